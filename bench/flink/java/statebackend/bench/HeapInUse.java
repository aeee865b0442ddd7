package statebackend.bench;

import java.lang.management.ManagementFactory;

/** What the objects that are alive take of the JVM's heap. */
public final class HeapInUse {

    private HeapInUse() {}

    /** Bytes in use after full collections. */
    public static long bytes() {
        System.gc();
        System.gc();
        return ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed();
    }

    /** The record of so many entries that took so many bytes together. */
    public static Json record(long bytes, int n, int keyGroups) {
        return new Json()
                .put("name", "bytes_per_entry")
                .put("n", n)
                .put("key_groups", keyGroups)
                .put("bytes_total", bytes)
                .put("bytes_per_entry", bytes / (double) n);
    }
}
