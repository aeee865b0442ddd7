package statebackend.bench;

import java.util.OptionalLong;

/**
 * One operation under measurement. Only {@link #run} is timed; a round is prepare, run, check.
 */
public abstract class Scenario {

    /**
     * Rows per call of a timed block. The loop over rows sits in a method that is called many times, so that it is
     * compiled as a method: one endless loop would only ever run as an on-stack replacement, which is slower and
     * would flatter the other side.
     */
    private static final int BLOCK = 8192;

    /** How many operations one {@link #run} carries out. */
    public abstract long operations();

    /** Whether every round starts from empty state: then nothing but input is alive when it starts. */
    public boolean startsEmpty() {
        return false;
    }

    /** Builds the input of a round, outside the timed part. Rounds count from 0 and include the warm-up. */
    public void prepare(int round) throws Exception {}

    public abstract void run() throws Exception;

    /** Throws unless the result of {@link #run} is right; outside the timed part. */
    public abstract void check(int round) throws Exception;

    /** A checksum of what the state holds after the last round, where the other side computes the same one. */
    public OptionalLong contents() throws Exception {
        return OptionalLong.empty();
    }

    /** Rows {@code from} to {@code to} of the timed part. */
    protected interface Block {
        void rows(int from, int to) throws Exception;
    }

    protected static void inBlocks(int n, Block block) throws Exception {
        for (int from = 0; from < n; from += BLOCK) {
            block.rows(from, Math.min(n, from + BLOCK));
        }
    }

    protected static void require(boolean condition, String what) {
        if (!condition) {
            throw new IllegalStateException("wrong result: " + what);
        }
    }
}
