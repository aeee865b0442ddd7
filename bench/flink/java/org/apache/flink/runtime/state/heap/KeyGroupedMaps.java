package org.apache.flink.runtime.state.heap;

import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.runtime.state.KeyGroupRangeAssignment;
import org.apache.flink.runtime.state.VoidNamespace;

/**
 * Raw state maps, one per key group, as StateTable keeps them.
 *
 * <p>It lives in Flink's package because the map's constructor is package-private. The map of a key is picked as
 * Flink picks it for every record (Murmur of the key's hash modulo the number of key groups), and nothing else of
 * the state API is in the way: this is Flink at its fastest.
 */
final class KeyGroupedMaps<K> {

    private final CopyOnWriteStateMap<K, VoidNamespace, Long>[] maps;

    @SuppressWarnings({"unchecked", "rawtypes"})
    KeyGroupedMaps(int keyGroups) {
        maps = new CopyOnWriteStateMap[keyGroups];
        for (int i = 0; i < keyGroups; i++) {
            maps[i] = new CopyOnWriteStateMap<>(LongSerializer.INSTANCE);
        }
    }

    CopyOnWriteStateMap<K, VoidNamespace, Long> of(K key) {
        return maps[KeyGroupRangeAssignment.assignToKeyGroup(key, maps.length)];
    }

    /** All maps, in the order of the key groups. */
    CopyOnWriteStateMap<K, VoidNamespace, Long>[] all() {
        return maps;
    }

    int size() {
        int size = 0;
        for (CopyOnWriteStateMap<K, VoidNamespace, Long> map : maps) {
            size += map.size();
        }
        return size;
    }

    Snapshots<K> snapshot() {
        return new Snapshots<>(maps);
    }

    /** One snapshot of every map, taken when this is made. */
    static final class Snapshots<K> {

        final CopyOnWriteStateMapSnapshot<K, VoidNamespace, Long>[] all;

        @SuppressWarnings({"unchecked", "rawtypes"})
        Snapshots(CopyOnWriteStateMap<K, VoidNamespace, Long>[] maps) {
            all = new CopyOnWriteStateMapSnapshot[maps.length];
            for (int i = 0; i < maps.length; i++) {
                all[i] = maps[i].stateSnapshot();
            }
        }

        void release() {
            for (CopyOnWriteStateMapSnapshot<K, VoidNamespace, Long> snapshot : all) {
                snapshot.release();
            }
        }
    }
}
