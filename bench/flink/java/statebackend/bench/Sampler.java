package statebackend.bench;

import java.io.IOException;
import java.lang.management.GarbageCollectorMXBean;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.OptionalLong;

/**
 * Runs the rounds of a scenario: first the warm-up, then the samples.
 *
 * <p>When to collect decides the figures of G1. A forced collection moves the state to the old generation, where
 * every write of a reference passes G1's barrier and its refinement: updates become several times slower. That is
 * how a job of some age runs, but not Flink at its best, so state is moved only when "settled" is asked for.
 * Where a round starts from empty state there is nothing to move, and a collection only clears old rounds away.
 *
 * <p>"Stepwise", the driver says when each round begins, a byte on standard input for each, and is told when it has
 * ended: so the rounds of several processes can take turns.
 */
public final class Sampler {

    private final int samples;
    private final int warmup;
    private final boolean settled;
    private final boolean stepwise;

    public Sampler(Args args) {
        this.samples = args.integer("samples");
        this.warmup = args.integer("warmup");
        this.settled = args.integer("settled") != 0;
        this.stepwise = args.integer("stepwise") != 0;
    }

    /** Measures and returns a record with the fields every measurement has. */
    public Json measure(String name, int n, int keyGroups, Scenario scenario) throws Exception {
        double[] nanos = new double[samples];
        long collecting = 0;
        for (int round = 0; round < warmup + samples; round++) {
            if (stepwise) {
                awaitTurn();
            }
            scenario.prepare(round);
            if (settled || scenario.startsEmpty()) {
                System.gc();
            }
            long collectedBefore = collectionMillis();
            long start = System.nanoTime();
            scenario.run();
            long took = System.nanoTime() - start;
            long collected = collectionMillis() - collectedBefore;
            scenario.check(round);
            if (round >= warmup) {
                nanos[round - warmup] = took;
                collecting += collected;
            }
            if (stepwise) {
                new Json().put("record", "round").put("round", round).put("nanos", took).print();
            }
        }
        Json record = record(name, n, keyGroups, scenario.operations(), nanos)
                .put("gc_ms_in_samples", collecting)
                .put("warmup_rounds", warmup);
        OptionalLong contents = scenario.contents();
        if (contents.isPresent()) {
            record.put("contents", contents.getAsLong());
        }
        return record;
    }

    private static void awaitTurn() throws IOException {
        if (System.in.read() < 0) {
            throw new IOException("the driver has gone before the last round");
        }
    }

    /** The common fields, from the nanoseconds of whole samples. */
    public static Json record(String name, int n, int keyGroups, long operations, double[] nanos) {
        double[] perOperation = new double[nanos.length];
        double[] millis = new double[nanos.length];
        for (int i = 0; i < nanos.length; i++) {
            perOperation[i] = nanos[i] / operations;
            millis[i] = nanos[i] / 1e6;
        }
        return new Json()
                .put("name", name)
                .put("n", n)
                .put("key_groups", keyGroups)
                .put("operations", operations)
                .put("samples_ns_per_op", perOperation)
                .put("median_ns_per_op", median(perOperation))
                .put("median_mops", 1e3 / median(perOperation))
                .put("samples_ms", millis)
                .put("median_ms", median(millis));
    }

    /** The middle value; not a number if there is none. */
    public static double median(double[] values) {
        if (values.length == 0) {
            return Double.NaN;
        }
        double[] sorted = values.clone();
        Arrays.sort(sorted);
        int middle = sorted.length / 2;
        return sorted.length % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
    }

    /** Time spent in collections so far. */
    static long collectionMillis() {
        long millis = 0;
        for (GarbageCollectorMXBean collector : ManagementFactory.getGarbageCollectorMXBeans()) {
            millis += Math.max(0, collector.getCollectionTime());
        }
        return millis;
    }
}
