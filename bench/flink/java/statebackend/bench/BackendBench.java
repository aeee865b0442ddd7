package statebackend.bench;

/** Measures Flink's heap keyed-state backend through the state API, one line of JSON per operation. */
public final class BackendBench {

    private BackendBench() {}

    public static void main(String[] argv) throws Exception {
        Args args = new Args(argv);
        KeyFile keys = KeyFile.read(args);
        Header.print("backend", keys);
        int keyGroups = args.integer("key-groups");
        Ttl ttl = Ttl.named(args.text("ttl"));
        for (String operation : args.list("ops")) {
            Scenario scenario = scenario(operation, keys, keyGroups, ttl);
            new Sampler(args)
                    .measure(operation, keys.size(), keyGroups, scenario)
                    .put("key_type", "long")
                    .put("ttl", args.text("ttl"))
                    .print();
        }
    }

    private static Scenario scenario(String operation, KeyFile keys, int keyGroups, Ttl ttl) throws Exception {
        switch (operation) {
            case "value_update":
                return new ValueScenarios.Update(keys, keyGroups, ttl);
            case "value_get":
                return new ValueScenarios.Get(keys, keyGroups, ttl);
            case "value_rmw":
                return new ValueScenarios.ReadModifyWrite(keys, keyGroups, ttl);
            case "value_add":
                return new ValueScenarios.Add(keys, keyGroups, ttl);
            case "reducing_add":
                return new ValueScenarios.ReducingAdd(keys, keyGroups, ttl);
            case "map_get":
                return new MapStateScenarios.Get(keys, keyGroups, ttl);
            case "map_update":
                return new MapStateScenarios.Update(keys, keyGroups, ttl);
            case "map_iterate":
                return new MapStateScenarios.Iterate(keys, keyGroups, ttl);
            case "list_append":
                return new ListScenarios.Append(keys, keyGroups, ttl);
            case "list_get":
                return new ListScenarios.Get(keys, keyGroups, ttl);
            default:
                throw new IllegalArgumentException("no such operation: " + operation);
        }
    }
}
