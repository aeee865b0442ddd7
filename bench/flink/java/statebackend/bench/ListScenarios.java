package statebackend.bench;

import java.util.stream.StreamSupport;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.typeutils.base.LongSerializer;

/** Timed operations on a list state of longs, with {@link #ELEMENTS} elements per key. */
final class ListScenarios {

    /** Each list holds the key, then the key plus one. */
    static final int ELEMENTS = 2;

    private ListScenarios() {}

    private abstract static class OnLists extends BackendScenario<ListState<Long>> {

        OnLists(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl.on(new ListStateDescriptor<>("list", LongSerializer.INSTANCE)));
        }

        @Override
        final long[] held() throws Exception {
            return StreamSupport.stream(state.get().spliterator(), false)
                    .mapToLong(Long::longValue)
                    .toArray();
        }
    }

    /**
     * Append to a list that exists. Every round starts from lists with their first element, or the lists would be
     * longer from sample to sample.
     */
    static final class Append extends OnLists {
        private Long[] values;

        Append(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        public void prepare(int round) throws Exception {
            newBackend();
            forEachKey(key -> state.add(key));
            super.prepare(round);
            values = values(1);
        }

        @Override
        void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                state.add(values[i]);
            }
        }

        @Override
        public void check(int round) throws Exception {
            checkEntries();
            for (int i = 0; i < n; i++) {
                backend.setCurrentKey(probe[i]);
                long expected = order[i];
                for (Long element : state.get()) {
                    require(element == expected++, "an element of a list");
                }
                require(expected == order[i] + ELEMENTS, "the length of a list");
            }
        }
    }

    /** Get the list of every key and iterate its elements. An operation is one list. */
    static final class Get extends OnLists {
        private long sum;

        Get(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
            forEachKey(key -> {
                state.add(key);
                state.add(key + 1);
            });
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
                for (Long element : state.get()) {
                    total += element;
                }
            }
            sum += total;
        }

        @Override
        public void check(int round) {
            require(sum == ELEMENTS * keys.sum() + n, "the sum of the elements");
        }
    }
}
