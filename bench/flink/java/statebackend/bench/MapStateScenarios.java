package statebackend.bench;

import java.util.Map;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.typeutils.base.LongSerializer;

/** Timed operations on a map state, long to long, with {@link #ENTRIES} entries per key. */
final class MapStateScenarios {

    /** Map keys 0 to 3 under every key; the value is "key + map key + added". */
    static final int ENTRIES = 4;

    private MapStateScenarios() {}

    private abstract static class OnMaps extends BackendScenario<MapState<Long, Long>> {
        /** What the rounds have added to the value of each map key. */
        final long[] added = new long[ENTRIES];

        /** Fresh objects, map key "round modulo ENTRIES" for all: each round touches one entry per key. */
        Long[] mapKeys;

        OnMaps(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(
                    keys,
                    keyGroups,
                    ttl.on(new MapStateDescriptor<>("map", LongSerializer.INSTANCE, LongSerializer.INSTANCE)));
            forEachKey(key -> {
                for (long mapKey = 0; mapKey < ENTRIES; mapKey++) {
                    state.put(mapKey, key + mapKey);
                }
            });
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            mapKeys = new Long[n];
            for (int i = 0; i < n; i++) {
                // Small numbers come from the cache of Long; the HashMap under the state compares them either way.
                mapKeys[i] = (long) (round % ENTRIES);
            }
        }

        /** Map keys and values in turn, by map key. */
        @Override
        final long[] held() throws Exception {
            long[] held = new long[2 * ENTRIES];
            for (int mapKey = 0; mapKey < ENTRIES; mapKey++) {
                held[2 * mapKey] = mapKey;
                held[2 * mapKey + 1] = state.get((long) mapKey);
            }
            return held;
        }

        final void checkValues() throws Exception {
            checkEntries();
            for (int i = 0; i < n; i++) {
                backend.setCurrentKey(probe[i]);
                for (long mapKey = 0; mapKey < ENTRIES; mapKey++) {
                    long expected = order[i] + mapKey + added[(int) mapKey];
                    require(state.get(mapKey) == expected, "the value of a map key");
                }
            }
        }
    }

    /** Read one entry of the map of every key. */
    static final class Get extends OnMaps {
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
                total += state.get(mapKeys[i]);
            }
            sum += total;
        }

        @Override
        public void check(int round) {
            require(sum == keys.sum() + n * (long) (round % ENTRIES), "the sum of the values read");
        }
    }

    /** Overwrite one entry of the map of every key. */
    static final class Update extends OnMaps {
        private Long[] values;

        Update(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            int mapKey = round % ENTRIES;
            added[mapKey]++;
            values = values(mapKey + added[mapKey]);
        }

        @Override
        void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                state.put(mapKeys[i], values[i]);
            }
        }

        @Override
        public void check(int round) throws Exception {
            checkValues();
        }
    }

    /** Iterate the entries of the map of every key. An operation is one entry. */
    static final class Iterate extends OnMaps {
        private long sum;

        Iterate(KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
            super(keys, keyGroups, ttl);
        }

        @Override
        public long operations() {
            return (long) n * ENTRIES;
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
                for (Map.Entry<Long, Long> entry : state.entries()) {
                    total += entry.getKey() + entry.getValue();
                }
            }
            sum += total;
        }

        @Override
        public void check(int round) {
            long mapKeysOfOneKey = ENTRIES * (ENTRIES - 1) / 2;
            // Each map key counts twice: once as itself and once within its value.
            require(sum == ENTRIES * keys.sum() + 2 * n * mapKeysOfOneKey, "the sum of the entries");
        }
    }
}
