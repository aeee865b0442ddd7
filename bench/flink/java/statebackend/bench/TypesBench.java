package statebackend.bench;

/** Measures Flink's heap keyed-state backend by the type of values, keys and map keys. */
public final class TypesBench {

    private TypesBench() {}

    public static void main(String[] argv) throws Exception {
        Args args = new Args(argv);
        KeyFile keys = KeyFile.read(args);
        Header.print("types", keys);
        int keyGroups = args.integer("key-groups");
        String type = args.text("type");
        for (String operation : args.list("ops")) {
            if (operation.equals("bytes_per_entry")) {
                bytesPerEntry(args.text("role"), Kind.named(type), keys, keyGroups).put("type", type).print();
                continue;
            }
            new Sampler(args)
                    .measure(operation, keys.size(), keyGroups, scenario(operation, Kind.named(type), keys, keyGroups))
                    .put("type", type)
                    .print();
        }
    }

    private static <T> Json bytesPerEntry(String role, Kind<T> kind, KeyFile keys, int keyGroups) throws Exception {
        switch (role) {
            case "value":
                return TypedScenarios.bytesPerEntry(Kind.BIGINT, kind, keys, keyGroups);
            case "key":
                return TypedScenarios.bytesPerEntry(kind, Kind.BIGINT, keys, keyGroups);
            default:
                throw new IllegalArgumentException("no such role: " + role);
        }
    }

    private static <T> Scenario scenario(String operation, Kind<T> kind, KeyFile keys, int keyGroups)
            throws Exception {
        switch (operation) {
            case "value_update":
                return new TypedScenarios.Update<>(Kind.BIGINT, kind, keys, keyGroups);
            case "value_get":
                return new TypedScenarios.Get<>(Kind.BIGINT, kind, keys, keyGroups);
            case "key_update":
                return new TypedScenarios.Update<>(kind, Kind.BIGINT, keys, keyGroups);
            case "map_put":
                return new TypedScenarios.MapPut<>(Kind.BIGINT, kind, keys, keyGroups);
            case "map_get":
                return new TypedScenarios.MapGet<>(Kind.BIGINT, kind, keys, keyGroups);
            default:
                throw new IllegalArgumentException("no such operation: " + operation);
        }
    }
}
