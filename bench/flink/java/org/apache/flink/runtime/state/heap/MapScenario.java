package org.apache.flink.runtime.state.heap;

import org.apache.flink.runtime.state.VoidNamespace;
import statebackend.bench.KeyFile;
import statebackend.bench.KeyMaker;
import statebackend.bench.Scenario;

/**
 * A scenario on raw maps that hold every key of the file. The value of a key is the key plus {@link #added}, so
 * that every single value can be checked.
 */
abstract class MapScenario<K> extends Scenario {

    static final VoidNamespace VOID = VoidNamespace.INSTANCE;

    final KeyFile keys;
    final KeyMaker<K> maker;
    final int n;
    KeyGroupedMaps<K> maps;

    /** What has been added to every value since the keys were inserted. */
    long added;

    /** Fresh key objects in the order of the round, and the numbers they were made from. */
    K[] probe;

    long[] order;

    MapScenario(KeyFile keys, KeyMaker<K> maker) {
        this.keys = keys;
        this.maker = maker;
        this.n = keys.size();
    }

    /** New maps with all keys, in the order of the file. */
    final void fill(int keyGroups) {
        maps = new KeyGroupedMaps<>(keyGroups);
        for (long number : keys.insertionOrder()) {
            K key = maker.make(number);
            maps.of(key).put(key, VOID, number);
        }
    }

    final void newOrder(int round) {
        order = keys.order(round);
        probe = maker.make(order);
    }

    /** Boxed values for the keys in the order of the round: boxing is not part of what is timed. */
    final Long[] values(long plus) {
        Long[] values = new Long[n];
        for (int i = 0; i < n; i++) {
            values[i] = order[i] + plus;
        }
        return values;
    }

    @Override
    public long operations() {
        return n;
    }

    /** Every key is there, with the value it should have. */
    final void checkValues() {
        require(maps.size() == n, "the maps hold " + maps.size() + " entries, not " + n);
        for (int i = 0; i < n; i++) {
            Long value = maps.of(probe[i]).get(probe[i], VOID);
            require(value != null && value == order[i] + added, "the value of a key");
        }
    }
}
