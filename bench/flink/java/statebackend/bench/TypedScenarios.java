package statebackend.bench;

import java.util.Arrays;
import java.util.OptionalLong;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.State;
import org.apache.flink.api.common.state.StateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;

/** Timed operations through the state API where values, keys or map keys are objects of a {@link Kind}. */
final class TypedScenarios {

    private TypedScenarios() {}

    /** The heap that a filled state takes, the objects of its keys and values included. */
    static <K, V> Json bytesPerEntry(Kind<K> keyKind, Kind<V> kind, KeyFile keys, int keyGroups) throws Exception {
        fill(keyKind, kind, Arrays.copyOf(keys.insertionOrder(), 1), keyGroups); // classes are loaded now
        long before = HeapInUse.bytes();
        HeapKeyedStateBackend<K> filled = fill(keyKind, kind, keys.insertionOrder(), keyGroups);
        long used = HeapInUse.bytes() - before;
        Scenario.require(filled.numKeyValueStateEntries() == keys.size(), "entries in the backend");
        return HeapInUse.record(used, keys.size(), keyGroups);
    }

    private static <K, V> HeapKeyedStateBackend<K> fill(Kind<K> keyKind, Kind<V> kind, long[] numbers, int keyGroups)
            throws Exception {
        HeapKeyedStateBackend<K> backend = Backends.create(keyKind.serializer, keyGroups);
        ValueState<V> state = Backends.state(backend, new ValueStateDescriptor<>("value", kind.serializer));
        for (long number : numbers) {
            backend.setCurrentKey(keyKind.make(number));
            state.update(kind.make(number));
        }
        return backend;
    }

    private abstract static class Typed<K, S extends State> extends Scenario {
        final KeyFile keys;
        final int n;
        final Kind<K> keyKind;
        final HeapKeyedStateBackend<K> backend;
        final S state;

        /** Fresh key objects in the order of the round, and the numbers they were made from. */
        Object[] probe;

        long[] order;

        Typed(Kind<K> keyKind, KeyFile keys, int keyGroups, StateDescriptor<S, ?> descriptor) throws Exception {
            this.keys = keys;
            this.n = keys.size();
            this.keyKind = keyKind;
            this.backend = Backends.create(keyKind.serializer, keyGroups);
            this.state = Backends.state(backend, descriptor);
        }

        @Override
        public long operations() {
            return n;
        }

        @Override
        public void prepare(int round) throws Exception {
            order = keys.order(round);
            probe = keyKind.make(order, 0);
        }

        @Override
        public final void run() throws Exception {
            inBlocks(n, this::rows);
        }

        abstract void rows(int from, int to) throws Exception;

        @Override
        public void check(int round) throws Exception {
            require(backend.numKeyValueStateEntries() == n, "entries in the backend");
        }

        /** The numbers that the state holds under the current key. */
        abstract long[] held() throws Exception;

        @Override
        public final OptionalLong contents() throws Exception {
            long[] inserted = keys.insertionOrder();
            long[] held = new long[n];
            for (int i = 0; i < n; i++) {
                backend.setCurrentKey(keyKind.make(inserted[i]));
                held[i] = KeyFile.checksum(held());
            }
            return OptionalLong.of(KeyFile.checksum(held));
        }
    }

    /** Keys with a value each, all there before the first round. */
    private abstract static class OnValues<K, V> extends Typed<K, ValueState<V>> {
        final Kind<V> kind;

        OnValues(Kind<K> keyKind, Kind<V> kind, KeyFile keys, int keyGroups) throws Exception {
            super(keyKind, keys, keyGroups, new ValueStateDescriptor<>("value", kind.serializer));
            this.kind = kind;
            for (long key : keys.insertionOrder()) {
                backend.setCurrentKey(keyKind.make(key));
                state.update(kind.make(key));
            }
        }

        @Override
        final long[] held() throws Exception {
            return kind.numbers(state.value());
        }
    }

    /** Overwrite the value of every key. */
    static final class Update<K, V> extends OnValues<K, V> {
        private Object[] values;

        Update(Kind<K> keyKind, Kind<V> kind, KeyFile keys, int keyGroups) throws Exception {
            super(keyKind, kind, keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            values = kind.make(order, round + 1);
        }

        @Override
        @SuppressWarnings("unchecked")
        void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey((K) probe[i]);
                state.update((V) values[i]);
            }
        }
    }

    /** Read the value of every key. */
    static final class Get<K, V> extends OnValues<K, V> {
        private long there;

        Get(Kind<K> keyKind, Kind<V> kind, KeyFile keys, int keyGroups) throws Exception {
            super(keyKind, kind, keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            there = 0;
        }

        @Override
        @SuppressWarnings("unchecked")
        void rows(int from, int to) throws Exception {
            long found = 0;
            for (int i = from; i < to; i++) {
                backend.setCurrentKey((K) probe[i]);
                if (state.value() != null) {
                    found++;
                }
            }
            there += found;
        }

        @Override
        public void check(int round) throws Exception {
            super.check(round);
            require(there == n, "the values read");
        }
    }

    /** Map keys 0 to {@link #ENTRIES} - 1, as objects of a kind, under every key; "key + map key + added" in each. */
    private abstract static class OnMaps<K, M> extends Typed<K, MapState<M, Long>> {
        static final int ENTRIES = MapStateScenarios.ENTRIES;

        final Kind<M> kind;

        /** What the rounds have added to the value of each map key. */
        final long[] added = new long[ENTRIES];

        /** Fresh objects, of the number "round modulo ENTRIES" for all: each round touches one entry per key. */
        Object[] mapKeys;

        OnMaps(Kind<K> keyKind, Kind<M> kind, KeyFile keys, int keyGroups) throws Exception {
            super(
                    keyKind,
                    keys,
                    keyGroups,
                    new MapStateDescriptor<>("map", kind.serializer, LongSerializer.INSTANCE));
            this.kind = kind;
            for (long key : keys.insertionOrder()) {
                backend.setCurrentKey(keyKind.make(key));
                for (long number = 0; number < ENTRIES; number++) {
                    state.put(kind.make(number), key + number);
                }
            }
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            mapKeys = kind.make(new long[n], round % ENTRIES);
        }

        @Override
        final long[] held() throws Exception {
            long[] held = new long[2 * ENTRIES];
            for (int number = 0; number < ENTRIES; number++) {
                held[2 * number] = number;
                held[2 * number + 1] = state.get(kind.make(number));
            }
            return held;
        }
    }

    /** Overwrite one entry of the map of every key. */
    static final class MapPut<K, M> extends OnMaps<K, M> {
        private Long[] values;

        MapPut(Kind<K> keyKind, Kind<M> kind, KeyFile keys, int keyGroups) throws Exception {
            super(keyKind, kind, keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            int number = round % ENTRIES;
            added[number]++;
            values = new Long[n];
            for (int i = 0; i < n; i++) {
                values[i] = order[i] + number + added[number];
            }
        }

        @Override
        @SuppressWarnings("unchecked")
        void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey((K) probe[i]);
                state.put((M) mapKeys[i], values[i]);
            }
        }
    }

    /** Read one entry of the map of every key. */
    static final class MapGet<K, M> extends OnMaps<K, M> {
        private long sum;

        MapGet(Kind<K> keyKind, Kind<M> kind, KeyFile keys, int keyGroups) throws Exception {
            super(keyKind, kind, keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            sum = 0;
        }

        @Override
        @SuppressWarnings("unchecked")
        void rows(int from, int to) throws Exception {
            long total = 0;
            for (int i = from; i < to; i++) {
                backend.setCurrentKey((K) probe[i]);
                total += state.get((M) mapKeys[i]);
            }
            sum += total;
        }

        @Override
        public void check(int round) throws Exception {
            super.check(round);
            require(sum == keys.sum() + n * (long) (round % ENTRIES), "the sum of the values read");
        }
    }
}
