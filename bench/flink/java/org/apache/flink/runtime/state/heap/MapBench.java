package org.apache.flink.runtime.state.heap;

import statebackend.bench.Args;
import statebackend.bench.Header;
import statebackend.bench.Json;
import statebackend.bench.KeyFile;
import statebackend.bench.KeyMaker;
import statebackend.bench.Sampler;

/** Measures Flink's CopyOnWriteStateMap without the state API around it, one line of JSON per operation. */
public final class MapBench {

    private MapBench() {}

    public static void main(String[] argv) throws Exception {
        Args args = new Args(argv);
        KeyFile keys = KeyFile.read(args);
        Header.print("map", keys);
        String keyType = args.text("key-type");
        for (String operation : args.list("ops")) {
            measure(operation, args, keys, KeyMaker.named(keyType)).put("key_type", keyType).print();
        }
    }

    private static <K> Json measure(String operation, Args args, KeyFile keys, KeyMaker<K> maker) throws Exception {
        int keyGroups = args.integer("key-groups");
        MapGrowth<K> growth = new MapGrowth<>(keys, maker, keyGroups);
        switch (operation) {
            case "worst_put_wall":
                return growth.wallTime(args.integer("samples"));
            case "worst_put_cpu":
                return growth.cpuTime(args.integer("samples"));
            case "bytes_per_entry":
                return growth.bytesPerEntry();
            default:
                MapScenario<K> scenario = scenario(operation, keyGroups, keys, maker);
                return new Sampler(args).measure(operation, keys.size(), keyGroups, scenario);
        }
    }

    private static <K> MapScenario<K> scenario(String operation, int keyGroups, KeyFile keys, KeyMaker<K> maker) {
        switch (operation) {
            case "add":
                return new MapScenarios.Add<>(keys, maker, keyGroups);
            case "update":
                return new MapScenarios.Update<>(keys, maker, keyGroups);
            case "get":
                return new MapScenarios.Get<>(keys, maker, keyGroups);
            case "transform":
                return new MapScenarios.Transform<>(keys, maker, keyGroups);
            case "update_under_snapshot":
                return new MapScenarios.UpdateUnderSnapshot<>(keys, maker, keyGroups);
            case "snapshot_pause":
                return new MapScenarios.SnapshotPause<>(keys, maker, keyGroups);
            case "snapshot_write":
                return new MapScenarios.SnapshotWrite<>(keys, maker, keyGroups);
            default:
                throw new IllegalArgumentException("no such operation: " + operation);
        }
    }
}
