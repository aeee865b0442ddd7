package statebackend.bench;

import java.util.List;

/** One JSON object on one line of standard output. */
public final class Json {

    private final StringBuilder out = new StringBuilder("{");

    public Json put(String name, String value) {
        return raw(name, quote(value));
    }

    public Json put(String name, long value) {
        return raw(name, Long.toString(value));
    }

    public Json put(String name, double value) {
        return raw(name, number(value));
    }

    public Json put(String name, double[] values) {
        StringBuilder list = new StringBuilder("[");
        for (int i = 0; i < values.length; i++) {
            list.append(i == 0 ? "" : ", ").append(number(values[i]));
        }
        return raw(name, list.append(']').toString());
    }

    public Json put(String name, List<String> values) {
        StringBuilder list = new StringBuilder("[");
        for (int i = 0; i < values.size(); i++) {
            list.append(i == 0 ? "" : ", ").append(quote(values.get(i)));
        }
        return raw(name, list.append(']').toString());
    }

    public Json put(String name, Json value) {
        return raw(name, value.toString());
    }

    public void print() {
        System.out.println(this);
        System.out.flush();
    }

    @Override
    public String toString() {
        return out + "}";
    }

    private Json raw(String name, String value) {
        out.append(out.length() == 1 ? "" : ", ").append(quote(name)).append(": ").append(value);
        return this;
    }

    private static String number(double value) {
        // JSON has no NaN and no infinity.
        return Double.isFinite(value) ? Double.toString(value) : "null";
    }

    private static String quote(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                quoted.append('\\').append(c);
            } else if (c < ' ') {
                quoted.append(String.format("\\u%04x", (int) c));
            } else {
                quoted.append(c);
            }
        }
        return quoted.append('"').toString();
    }
}
