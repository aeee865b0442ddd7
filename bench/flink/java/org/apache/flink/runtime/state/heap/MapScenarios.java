package org.apache.flink.runtime.state.heap;

import java.util.Iterator;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.core.memory.DataOutputView;
import org.apache.flink.core.memory.DataOutputViewStreamWrapper;
import org.apache.flink.runtime.state.StateEntry;
import org.apache.flink.runtime.state.StateTransformationFunction;
import org.apache.flink.runtime.state.VoidNamespace;
import org.apache.flink.runtime.state.VoidNamespaceSerializer;
import statebackend.bench.ByteCounter;
import statebackend.bench.KeyFile;
import statebackend.bench.KeyMaker;

/** The timed operations on raw maps, one class each. */
final class MapScenarios {

    private MapScenarios() {}

    /** Insert all keys into empty maps. */
    static final class Add<K> extends MapScenario<K> {
        private final int keyGroups;
        private Long[] values;

        Add(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker);
            this.keyGroups = keyGroups;
        }

        @Override
        public boolean startsEmpty() {
            return true;
        }

        @Override
        public void prepare(int round) {
            maps = new KeyGroupedMaps<>(keyGroups);
            newOrder(round);
            values = values(0);
        }

        @Override
        public void run() throws Exception {
            inBlocks(n, this::rows);
        }

        private void rows(int from, int to) {
            for (int i = from; i < to; i++) {
                K key = probe[i];
                maps.of(key).put(key, VOID, values[i]);
            }
        }

        @Override
        public void check(int round) {
            // Other objects than those inserted, so that the check compares by value too.
            probe = maker.make(order);
            checkValues();
        }
    }

    /** Put on existing keys. */
    static class Update<K> extends MapScenario<K> {
        private Long[] values;

        Update(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker);
            fill(keyGroups);
        }

        @Override
        public void prepare(int round) {
            added++;
            newOrder(round);
            values = values(added);
        }

        @Override
        public final void run() throws Exception {
            inBlocks(n, this::rows);
        }

        private void rows(int from, int to) {
            for (int i = from; i < to; i++) {
                K key = probe[i];
                maps.of(key).put(key, VOID, values[i]);
            }
        }

        @Override
        public void check(int round) {
            checkValues();
        }
    }

    /** Put on existing keys while a snapshot is held: every entry is touched once and so copied once. */
    static final class UpdateUnderSnapshot<K> extends Update<K> {
        private KeyGroupedMaps.Snapshots<K> held;

        UpdateUnderSnapshot(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker, keyGroups);
        }

        @Override
        public void prepare(int round) {
            super.prepare(round);
            held = maps.snapshot();
        }

        @Override
        public void check(int round) {
            long sum = 0;
            for (CopyOnWriteStateMapSnapshot<K, VoidNamespace, Long> snapshot : held.all) {
                Iterator<StateEntry<K, VoidNamespace, Long>> entries = snapshot.getIterator(
                        maker.serializer, VoidNamespaceSerializer.INSTANCE, LongSerializer.INSTANCE, null);
                while (entries.hasNext()) {
                    sum += entries.next().getState();
                }
            }
            require(sum == keys.sum() + n * (added - 1), "the snapshot must keep the values from before the round");
            held.release();
            held = null;
            super.check(round);
        }
    }

    /** Read every key. */
    static final class Get<K> extends MapScenario<K> {
        private long sum;

        Get(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker);
            fill(keyGroups);
        }

        @Override
        public void prepare(int round) {
            newOrder(round);
            sum = 0;
        }

        @Override
        public void run() throws Exception {
            inBlocks(n, this::rows);
        }

        private void rows(int from, int to) {
            long total = 0;
            for (int i = from; i < to; i++) {
                K key = probe[i];
                total += maps.of(key).get(key, VOID);
            }
            sum += total;
        }

        @Override
        public void check(int round) {
            require(sum == keys.sum(), "the sum of the values read");
        }
    }

    /** Add one to the value of every key with {@code transform}. */
    static final class Transform<K> extends MapScenario<K> {
        private static final StateTransformationFunction<Long, Long> SUM = (previous, value) -> previous + value;
        private static final Long ONE = 1L;

        Transform(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker);
            fill(keyGroups);
        }

        @Override
        public void prepare(int round) {
            added++;
            newOrder(round);
        }

        @Override
        public void run() throws Exception {
            inBlocks(n, this::rows);
        }

        private void rows(int from, int to) throws Exception {
            for (int i = from; i < to; i++) {
                K key = probe[i];
                maps.of(key).transform(key, VOID, ONE, SUM);
            }
        }

        @Override
        public void check(int round) {
            checkValues();
        }
    }

    /** The pause: a snapshot of every map, one after the other. */
    static final class SnapshotPause<K> extends MapScenario<K> {
        private KeyGroupedMaps.Snapshots<K> taken;

        SnapshotPause(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker);
            fill(keyGroups);
        }

        @Override
        public long operations() {
            return 1;
        }

        @Override
        public void run() {
            taken = maps.snapshot();
        }

        @Override
        public void check(int round) {
            require(taken.all.length == maps.all().length, "one snapshot per key group");
            taken.release();
            taken = null;
        }
    }

    /** Serialise every entry of a snapshot, uncompressed, into memory. */
    static final class SnapshotWrite<K> extends MapScenario<K> {
        private KeyGroupedMaps.Snapshots<K> taken;
        private ByteCounter bytes;

        SnapshotWrite(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
            super(keys, maker);
            fill(keyGroups);
        }

        @Override
        public void prepare(int round) {
            taken = maps.snapshot();
            bytes = new ByteCounter();
        }

        @Override
        public void run() throws Exception {
            DataOutputView view = new DataOutputViewStreamWrapper(bytes);
            for (CopyOnWriteStateMapSnapshot<K, VoidNamespace, Long> snapshot : taken.all) {
                snapshot.writeState(
                        maker.serializer, VoidNamespaceSerializer.INSTANCE, LongSerializer.INSTANCE, view, null);
            }
        }

        @Override
        public void check(int round) {
            // Per entry: at least one byte of namespace, one of key, eight of value.
            require(bytes.total() >= 10L * n, "the snapshot has " + bytes.total() + " bytes");
            taken.release();
            taken = null;
        }
    }
}
