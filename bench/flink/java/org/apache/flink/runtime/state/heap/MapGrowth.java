package org.apache.flink.runtime.state.heap;

import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.util.function.LongSupplier;
import statebackend.bench.HeapInUse;
import statebackend.bench.Json;
import statebackend.bench.KeyFile;
import statebackend.bench.KeyMaker;
import statebackend.bench.Latencies;
import statebackend.bench.Sampler;

/** What growing costs: the distribution of single puts, and the memory that is left behind. */
final class MapGrowth<K> {

    private final KeyFile keys;
    private final KeyMaker<K> maker;
    private final int keyGroups;

    MapGrowth(KeyFile keys, KeyMaker<K> maker, int keyGroups) {
        this.keys = keys;
        this.maker = maker;
        this.keyGroups = keyGroups;
    }

    /** By the clock on the wall: includes collections, and other processes on the machine. */
    Json wallTime(int rounds) {
        return worstPut("worst_put_wall", System::nanoTime, rounds);
    }

    /** By the CPU time of this thread: excludes collections, and the time other processes had the core. */
    Json cpuTime(int rounds) {
        ThreadMXBean threads = ManagementFactory.getThreadMXBean();
        return worstPut("worst_put_cpu", threads::getCurrentThreadCpuTime, rounds);
    }

    private Json worstPut(String name, LongSupplier clock, int rounds) {
        double[][] quantiles = new double[Latencies.levels()][rounds];
        double[] worst = new double[rounds];
        double clockCost = 0;
        // One round more than counted: the first is the warm-up.
        for (int round = -1; round < rounds; round++) {
            double[] seen = grow(clock).quantiles();
            clockCost = costOf(clock);
            for (int level = 0; round >= 0 && level < seen.length; level++) {
                quantiles[level][round] = seen[level];
                worst[round] = seen[seen.length - 1];
            }
        }
        double[] medians = new double[quantiles.length];
        for (int level = 0; level < medians.length; level++) {
            medians[level] = Sampler.median(quantiles[level]);
        }
        return new Json()
                .put("name", name)
                .put("n", keys.size())
                .put("key_groups", keyGroups)
                .put("quantiles_ns", Latencies.named(medians))
                .put("max_ns_per_round", worst)
                .put("clock_cost_ns", clockCost);
    }

    private Latencies grow(LongSupplier clock) {
        int n = keys.size();
        K[] fresh = maker.make(keys.insertionOrder());
        Long[] values = new Long[n];
        for (int i = 0; i < n; i++) {
            values[i] = keys.insertionOrder()[i];
        }
        KeyGroupedMaps<K> maps = new KeyGroupedMaps<>(keyGroups);
        Latencies latencies = new Latencies(n);
        System.gc();
        long before = clock.getAsLong();
        for (int i = 0; i < n; i++) {
            K key = fresh[i];
            maps.of(key).put(key, MapScenario.VOID, values[i]);
            long after = clock.getAsLong();
            latencies.set(i, after - before);
            before = after;
        }
        if (maps.size() != n) {
            throw new IllegalStateException("wrong result: entries after growing");
        }
        return latencies;
    }

    /** The clock is inside every figure: what one reading costs is reported beside them. */
    private static double costOf(LongSupplier clock) {
        int readings = 20_000;
        long start = System.nanoTime();
        long last = 0;
        for (int i = 0; i < readings; i++) {
            last |= clock.getAsLong();
        }
        return last == 0 ? 0 : (System.nanoTime() - start) / (double) readings;
    }

    /** Heap in use with the maps, their keys and their values, less the heap in use without. */
    Json bytesPerEntry() {
        long before = HeapInUse.bytes();
        KeyGroupedMaps<K> maps = new KeyGroupedMaps<>(keyGroups);
        for (long number : keys.insertionOrder()) {
            K key = maker.make(number);
            maps.of(key).put(key, MapScenario.VOID, number);
        }
        long used = HeapInUse.bytes() - before;
        if (maps.size() != keys.size()) {
            throw new IllegalStateException("wrong result: entries in the maps");
        }
        return HeapInUse.record(used, keys.size(), keyGroups);
    }
}
