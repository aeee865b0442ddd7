package statebackend.bench;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.RunnableFuture;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.runtime.checkpoint.CheckpointOptions;
import org.apache.flink.runtime.state.KeyedStateHandle;
import org.apache.flink.runtime.state.SnapshotResult;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;

/**
 * Measures what a checkpoint does to the thread that owns the state: the pause of {@code snapshot()}, which is the
 * time until the future is returned, and how much slower batches of updates are until the future is done.
 */
public final class SnapshotBench {

    private static final int BATCH = 10_000;
    private static final int BATCHES_BEFORE = 40;

    private final KeyFile keys;
    private final int keyGroups;
    private final HeapKeyedStateBackend<Long> backend;
    private final List<ValueState<Long>> states = new ArrayList<>();
    private final DiscardingStreamFactory streams = new DiscardingStreamFactory();

    /** Fresh key objects in random order, walked round and round by the batches. */
    private Long[] probe;

    private int position;
    private int batches;

    private SnapshotBench(KeyFile keys, int keyGroups, int numberOfStates) throws Exception {
        this.keys = keys;
        this.keyGroups = keyGroups;
        backend = Backends.create(KeyMaker.LONGS.serializer, keyGroups);
        for (int i = 0; i < numberOfStates; i++) {
            states.add(Backends.state(backend, new ValueStateDescriptor<>("value-" + i, LongSerializer.INSTANCE)));
        }
        for (long key : keys.insertionOrder()) {
            backend.setCurrentKey(key);
            for (ValueState<Long> state : states) {
                state.update(key);
            }
        }
    }

    public static void main(String[] argv) throws Exception {
        Args args = new Args(argv);
        KeyFile keys = KeyFile.read(args);
        Header.print("snapshot", keys);
        new SnapshotBench(keys, args.integer("key-groups"), args.integer("states"))
                .measure(args.integer("warmup"), args.integer("samples"));
    }

    private void measure(int warmup, int samples) throws Exception {
        double[] pauses = new double[samples];
        double[] writes = new double[samples];
        double[] before = new double[samples];
        double[] during = new double[samples];
        double[] slowdowns = new double[samples];
        double[] batchesDuring = new double[samples];
        long collecting = 0;
        for (int round = 0; round < warmup + samples; round++) {
            probe = KeyMaker.LONGS.make(keys.order(round));
            position = 0;
            // The arrays of a snapshot are large: without this, what is timed is often a collection.
            System.gc();
            double normal = batchesBefore();

            long collectedBefore = Sampler.collectionMillis();
            long start = System.nanoTime();
            RunnableFuture<SnapshotResult<KeyedStateHandle>> future = backend.snapshot(
                    round + 1, round + 1, streams, CheckpointOptions.forCheckpointWithDefaultLocation());
            long pause = System.nanoTime() - start;
            long collected = Sampler.collectionMillis() - collectedBefore;

            Thread writer = new Thread(future, "snapshot writer");
            long writeStart = System.nanoTime();
            writer.start();
            List<Double> slow = new ArrayList<>();
            while (!future.isDone()) {
                slow.add(batch());
            }
            long write = System.nanoTime() - writeStart;
            future.get();
            writer.join();
            check();
            if (round >= warmup) {
                int sample = round - warmup;
                pauses[sample] = pause;
                collecting += collected;
                writes[sample] = write / 1e6;
                before[sample] = normal;
                during[sample] = median(slow);
                slowdowns[sample] = during[sample] / normal;
                batchesDuring[sample] = slow.size();
            }
        }
        Sampler.record("snapshot_pause_backend", keys.size(), keyGroups, 1, pauses)
                .put("states", states.size())
                .put("entries", (long) keys.size() * states.size())
                .put("gc_ms_in_samples", collecting)
                .put("warmup_rounds", warmup)
                .put("bytes_written", streams.written())
                .put("samples_write_ms", writes)
                .put("median_write_ms", Sampler.median(writes))
                .put("batch_rows", BATCH)
                .put("batch_us_before", before)
                .put("batch_us_during", during)
                .put("batches_during", batchesDuring)
                .put("median_slowdown", Sampler.median(slowdowns))
                .print();
    }

    private double batchesBefore() throws Exception {
        List<Double> micros = new ArrayList<>();
        for (int i = 0; i < BATCHES_BEFORE; i++) {
            micros.add(batch());
        }
        return median(micros);
    }

    /**
     * Updates one state for the next keys; microseconds. The value written is the one that is there, so that the
     * contents stay known however many batches fit in; the map cannot tell the difference.
     */
    private double batch() throws Exception {
        ValueState<Long> state = states.get(batches++ % states.size());
        int from = position;
        int to = Math.min(probe.length, from + BATCH);
        long start = System.nanoTime();
        rows(state, from, to);
        long took = System.nanoTime() - start;
        position = to == probe.length ? 0 : to;
        // The last batch of a walk may be short: all are reported per full batch.
        return took / 1e3 * BATCH / (to - from);
    }

    private void rows(ValueState<Long> state, int from, int to) throws Exception {
        for (int i = from; i < to; i++) {
            backend.setCurrentKey(probe[i]);
            state.update(probe[i]);
        }
    }

    private void check() throws Exception {
        long entries = (long) keys.size() * states.size();
        Scenario.require(backend.numKeyValueStateEntries() == entries, "entries in the backend");
        // Each entry is written as one byte of namespace, eight of key, eight of value.
        Scenario.require(streams.written() >= 17 * entries, "bytes of the snapshot");
        long sum = 0;
        for (long key : keys.insertionOrder()) {
            backend.setCurrentKey(key);
            for (ValueState<Long> state : states) {
                sum += state.value();
            }
        }
        Scenario.require(sum == keys.sum() * states.size(), "the sum of all values");
    }

    private static double median(List<Double> values) {
        return Sampler.median(values.stream().mapToDouble(Double::doubleValue).toArray());
    }
}
