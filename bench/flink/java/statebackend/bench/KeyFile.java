package statebackend.bench;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;

/**
 * The keys of a run: little-endian int64 in insertion order, written by the Python side.
 *
 * <p>Every round visits the keys in an order of its own. One fixed order would flatter the peer: the value
 * objects of a round are allocated in the order of that round, so a second round in the same order walks memory
 * forwards. The orders come from sorting by an invertible mix of the key, which numpy reproduces exactly, so both
 * sides of a comparison see the same keys in the same orders and only the keys have to be handed over.
 */
public final class KeyFile {

    private static final long GOLDEN = 0x9e3779b97f4a7c15L;

    private final long[] keys;
    private final long seed;

    private KeyFile(long[] keys, long seed) {
        this.keys = keys;
        this.seed = seed;
    }

    /** Reads the file named by the arguments and refuses one that is not what the driver wrote. */
    public static KeyFile read(Args args) throws IOException {
        Path path = Path.of(args.text("keys"));
        int n = args.integer("n");
        try (FileChannel channel = FileChannel.open(path, StandardOpenOption.READ)) {
            if (channel.size() != 8L * n) {
                throw new KeyFileException("size is " + channel.size() + " bytes, " + 8L * n + " expected");
            }
            ByteBuffer block = ByteBuffer.allocateDirect(1 << 20).order(ByteOrder.LITTLE_ENDIAN);
            long[] keys = new long[n];
            int filled = 0;
            while (filled < n) {
                block.clear();
                while (block.hasRemaining() && channel.read(block) > 0) {
                    // A read may return less than the block and split a key: go on until full or at the end.
                }
                block.flip();
                int count = block.remaining() / 8;
                if (count == 0) {
                    throw new KeyFileException("the file became shorter while it was read");
                }
                block.asLongBuffer().get(keys, filled, count);
                filled += count;
            }
            if (checksum(keys) != args.number("checksum")) {
                throw new KeyFileException("the checksum differs: not the keys of this run");
            }
            requireDistinct(keys);
            return new KeyFile(keys, args.number("seed"));
        }
    }

    public int size() {
        return keys.length;
    }

    /** The keys in insertion order. Not to be changed. */
    public long[] insertionOrder() {
        return keys;
    }

    /** The keys in the random order of one round. */
    public long[] order(int round) {
        long salt = mix(seed + (round + 1) * GOLDEN);
        long[] order = new long[keys.length];
        for (int i = 0; i < order.length; i++) {
            order[i] = mix(keys[i] ^ salt);
        }
        Arrays.sort(order);
        for (int i = 0; i < order.length; i++) {
            order[i] = unmix(order[i]) ^ salt;
        }
        return order;
    }

    /** Sum of all keys, modulo 2^64. */
    public long sum() {
        long sum = 0;
        for (long key : keys) {
            sum += key;
        }
        return sum;
    }

    /** Depends on every key and on its place, modulo 2^64. */
    public static long checksum(long[] values) {
        long sum = 0;
        for (int i = 0; i < values.length; i++) {
            sum += values[i] * (2L * i + 1);
        }
        return sum;
    }

    /** A bijection of the 64-bit integers (the finaliser of SplitMix64). */
    public static long mix(long z) {
        z = (z ^ (z >>> 30)) * 0xbf58476d1ce4e5b9L;
        z = (z ^ (z >>> 27)) * 0x94d049bb133111ebL;
        return z ^ (z >>> 31);
    }

    private static long unmix(long z) {
        z = (z ^ (z >>> 31) ^ (z >>> 62)) * 0x319642b2d24d8ec3L;
        z = (z ^ (z >>> 27) ^ (z >>> 54)) * 0x96de1b173f119089L;
        return z ^ (z >>> 30) ^ (z >>> 60);
    }

    /** Repeated keys would make "add" an update and every count per entry wrong. */
    private static void requireDistinct(long[] keys) {
        long[] sorted = keys.clone();
        Arrays.sort(sorted);
        for (int i = 1; i < sorted.length; i++) {
            if (sorted[i] == sorted[i - 1]) {
                throw new KeyFileException("keys repeat");
            }
        }
    }

    /** The key file is not the one the driver announced. */
    public static final class KeyFileException extends IllegalArgumentException {
        private static final long serialVersionUID = 1L;

        KeyFileException(String message) {
            super("key file: " + message);
        }
    }
}
