package statebackend.bench;

import java.util.Arrays;

/** The distribution of single operations, in nanoseconds. */
public final class Latencies {

    private static final double[] LEVELS = {0.5, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 1.0};
    private static final String[] NAMES = {"p50", "p99", "p99_9", "p99_99", "p99_999", "p99_9999", "max"};

    private final long[] nanos;

    public Latencies(int n) {
        nanos = new long[n];
    }

    public void set(int i, long took) {
        nanos[i] = took;
    }

    /** Values at {@link #names}; sorts in place. */
    public double[] quantiles() {
        Arrays.sort(nanos);
        double[] values = new double[LEVELS.length];
        for (int i = 0; i < LEVELS.length; i++) {
            // Nearest rank: a quantile finer than 1/n is the largest value.
            int rank = (int) Math.ceil(LEVELS[i] * nanos.length);
            values[i] = nanos[Math.max(1, Math.min(nanos.length, rank)) - 1];
        }
        return values;
    }

    public static Json named(double[] quantiles) {
        Json json = new Json();
        for (int i = 0; i < NAMES.length; i++) {
            json.put(NAMES[i], quantiles[i]);
        }
        return json;
    }

    public static int levels() {
        return LEVELS.length;
    }
}
