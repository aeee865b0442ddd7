package statebackend.bench;

import org.apache.flink.api.common.state.ReducingState;
import org.apache.flink.api.common.state.ReducingStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeutils.base.LongSerializer;

/** Timed operations on a value state and a reducing state of longs. */
final class ValueScenarios {

    private ValueScenarios() {}

    /** Keys with the value "key + added", all there before the first round. */
    private abstract static class OnValues extends BackendScenario<ValueState<Long>> {
        long added;

        OnValues(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl.on(new ValueStateDescriptor<>("value", LongSerializer.INSTANCE)));
            forEachKey(key -> state.update(key));
        }

        @Override
        final long[] held() throws Exception {
            return new long[] {state.value()};
        }

        final void checkValues() throws Exception {
            checkEntries();
            for (int i = 0; i < n; i++) {
                backend.setCurrentKey(probe[i]);
                require(state.value() == order[i] + added, "the value of a key");
            }
        }
    }

    /** Overwrite the value of every key. */
    static class Update extends OnValues {
        private Long[] values;

        Update(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            added++;
            values = values(added);
        }

        @Override
        final void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                state.update(values[i]);
            }
        }

        @Override
        public void check(int round) throws Exception {
            checkValues();
        }
    }

    /** Give every key its first value: the same call on an empty backend. */
    static final class Add extends Update {

        Add(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        public boolean startsEmpty() {
            return true;
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            newBackend();
        }
    }

    /** Read the value of every key. */
    static final class Get extends OnValues {
        private long sum;

        Get(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            sum = 0;
        }

        @Override
        void rows(int from, int to) throws Exception {
            long total = 0;
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                total += state.value();
            }
            sum += total;
        }

        @Override
        public void check(int round) {
            require(sum == keys.sum(), "the sum of the values read");
        }
    }

    /** Read the value of every key, add one, write it. */
    static final class ReadModifyWrite extends OnValues {

        ReadModifyWrite(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                state.update(state.value() + 1);
            }
        }

        @Override
        public void check(int round) throws Exception {
            added++;
            checkValues();
        }
    }

    /** Add one to the sum of every key. */
    static final class ReducingAdd extends BackendScenario<ReducingState<Long>> {
        private static final Long ONE = 1L;

        private long added;

        ReducingAdd(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(
                    keys,
                    keyGroups,
                    ttl.on(new ReducingStateDescriptor<>("sum", Long::sum, LongSerializer.INSTANCE)));
            forEachKey(key -> state.add(key));
        }

        @Override
        long[] held() throws Exception {
            return new long[] {state.get()};
        }

        @Override
        void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                state.add(ONE);
            }
        }

        @Override
        public void check(int round) throws Exception {
            added++;
            checkEntries();
            for (int i = 0; i < n; i++) {
                backend.setCurrentKey(probe[i]);
                require(state.get() == order[i] + added, "the sum of a key");
            }
        }
    }
}
