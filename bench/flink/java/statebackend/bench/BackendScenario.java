package statebackend.bench;

import java.util.OptionalLong;
import org.apache.flink.api.common.state.State;
import org.apache.flink.api.common.state.StateDescriptor;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;

/**
 * A scenario on one state of Flink's heap backend, through the handle a user function holds. An operation is what
 * a record costs: {@code setCurrentKey}, then the handle.
 */
abstract class BackendScenario<S extends State> extends Scenario {

    final KeyFile keys;
    final int n;
    HeapKeyedStateBackend<Long> backend;
    S state;

    /** Fresh key objects in the order of the round, and the numbers they were made from. */
    Long[] probe;

    long[] order;

    private final int keyGroups;
    private final StateDescriptor<S, ?> descriptor;

    BackendScenario(KeyFile keys, int keyGroups, StateDescriptor<S, ?> descriptor) throws Exception {
        this.keys = keys;
        this.n = keys.size();
        this.keyGroups = keyGroups;
        this.descriptor = descriptor;
        newBackend();
    }

    /** An empty backend instead of the one before. */
    final void newBackend() throws Exception {
        if (backend != null) {
            backend.dispose();
        }
        backend = Backends.create(KeyMaker.LONGS.serializer, keyGroups);
        state = Backends.state(backend, descriptor);
    }

    /** What is to be done for each key, in the order of the file, before anything is measured. */
    protected interface PerKey {
        void accept(long key) throws Exception;
    }

    final void forEachKey(PerKey action) throws Exception {
        for (long key : keys.insertionOrder()) {
            backend.setCurrentKey(key);
            action.accept(key);
        }
    }

    final void newOrder(int round) {
        order = keys.order(round);
        probe = KeyMaker.LONGS.make(order);
    }

    /** Boxed values for the keys in the order of the round: boxing is not part of what is timed. */
    final Long[] values(long plus) {
        Long[] values = new Long[n];
        for (int i = 0; i < n; i++) {
            values[i] = order[i] + plus;
        }
        return values;
    }

    final void checkEntries() {
        require(backend.numKeyValueStateEntries() == n, "entries in the backend");
    }

    /** Depends on every value of every key and on their order; keys count in the order of the file. */
    @Override
    public final OptionalLong contents() throws Exception {
        long[] inserted = keys.insertionOrder();
        long[] held = new long[n];
        for (int i = 0; i < n; i++) {
            backend.setCurrentKey(inserted[i]);
            held[i] = KeyFile.checksum(held());
        }
        return OptionalLong.of(KeyFile.checksum(held));
    }

    /** What the state holds under the current key, read through the handle. */
    abstract long[] held() throws Exception;

    @Override
    public long operations() {
        return n;
    }

    @Override
    public void prepare(int round) throws Exception {
        newOrder(round);
    }

    @Override
    public final void run() throws Exception {
        inBlocks(n, this::rows);
    }

    abstract void rows(int from, int to) throws Exception;
}
