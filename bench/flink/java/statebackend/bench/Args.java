package statebackend.bench;

import java.util.HashMap;
import java.util.Map;

/** Arguments as {@code --name value} pairs. A missing one is an error: nothing here has a silent default. */
public final class Args {

    private final Map<String, String> values = new HashMap<>();

    public Args(String[] argv) {
        if (argv.length % 2 != 0) {
            throw new IllegalArgumentException("arguments come in pairs: --name value");
        }
        for (int i = 0; i < argv.length; i += 2) {
            if (!argv[i].startsWith("--")) {
                throw new IllegalArgumentException("not an argument name: " + argv[i]);
            }
            values.put(argv[i].substring(2), argv[i + 1]);
        }
    }

    public String text(String name) {
        String value = values.get(name);
        if (value == null) {
            throw new IllegalArgumentException("missing argument --" + name);
        }
        return value;
    }

    public int integer(String name) {
        return Integer.parseInt(text(name));
    }

    public long number(String name) {
        return Long.parseLong(text(name));
    }

    public String[] list(String name) {
        return text(name).split(",");
    }
}
