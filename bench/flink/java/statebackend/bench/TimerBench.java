package statebackend.bench;

import org.apache.flink.runtime.state.KeyGroupedInternalPriorityQueue;
import org.apache.flink.runtime.state.VoidNamespace;
import org.apache.flink.runtime.state.VoidNamespaceSerializer;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;
import org.apache.flink.streaming.api.operators.TimerHeapInternalTimer;
import org.apache.flink.streaming.api.operators.TimerSerializer;

/**
 * Measures Flink's heap timer queue (HeapPriorityQueueSet): register one timer per key, then poll them all; and the
 * timer service above it.
 */
public final class TimerBench {

    private TimerBench() {}

    public static void main(String[] argv) throws Exception {
        Args args = new Args(argv);
        KeyFile keys = KeyFile.read(args);
        Header.print("timers", keys);
        int keyGroups = args.integer("key-groups");
        for (String operation : args.list("ops")) {
            new Sampler(args)
                    .measure(operation, keys.size(), keyGroups, scenario(operation, keys, keyGroups))
                    .put("key_type", "long")
                    .print();
        }
    }

    private static Scenario scenario(String operation, KeyFile keys, int keyGroups) {
        switch (operation) {
            case "timer_register":
                return new Register(keys, keyGroups);
            case "timer_poll":
                return new Poll(keys, keyGroups);
            case "service_register":
                return new TimerServiceScenarios.Register(keys, keyGroups);
            case "service_fire":
                return new TimerServiceScenarios.Fire(keys, keyGroups);
            case "service_move":
                return new TimerServiceScenarios.Move(keys, keyGroups);
            default:
                throw new IllegalArgumentException("no such operation: " + operation);
        }
    }

    private abstract static class OnTimers extends Scenario {
        final int n;
        KeyGroupedInternalPriorityQueue<TimerHeapInternalTimer<Long, VoidNamespace>> queue;
        Long[] probe;

        private final KeyFile keys;
        private final int keyGroups;

        OnTimers(KeyFile keys, int keyGroups) {
            this.keys = keys;
            this.n = keys.size();
            this.keyGroups = keyGroups;
        }

        @Override
        public long operations() {
            return n;
        }

        @Override
        public boolean startsEmpty() {
            return true;
        }

        @Override
        public void prepare(int round) throws Exception {
            probe = KeyMaker.LONGS.make(keys.order(round));
            HeapKeyedStateBackend<Long> backend = Backends.create(KeyMaker.LONGS.serializer, keyGroups);
            queue = backend.create(
                    "timers", new TimerSerializer<>(KeyMaker.LONGS.serializer, VoidNamespaceSerializer.INSTANCE));
        }

        /** As the timer service does it, which makes the timer object inside the call. */
        final void register(int from, int to) {
            for (int i = from; i < to; i++) {
                queue.add(new TimerHeapInternalTimer<>(timeOf(probe[i]), probe[i], VoidNamespace.INSTANCE));
            }
        }

        /** A random time that follows from the key; never negative. */
        static long timeOf(long key) {
            return KeyFile.mix(key) >>> 1;
        }

        /** Takes all timers out: times never go back, and their keys are all the keys. */
        final void checkQueue() {
            require(queue.size() == n, "timers in the queue");
            long sum = 0;
            long last = Long.MIN_VALUE;
            for (int i = 0; i < n; i++) {
                TimerHeapInternalTimer<Long, VoidNamespace> timer = queue.poll();
                require(timer.getTimestamp() >= last, "the order of the timers");
                last = timer.getTimestamp();
                sum += timer.getKey();
            }
            require(queue.isEmpty() && sum == keys.sum(), "the timers in the queue");
        }

        final void checkSum(long sum) {
            require(queue.isEmpty() && sum == keys.sum(), "the sum of the keys polled");
        }
    }

    private static final class Register extends OnTimers {

        Register(KeyFile keys, int keyGroups) {
            super(keys, keyGroups);
        }

        @Override
        public void run() throws Exception {
            inBlocks(n, this::register);
        }

        @Override
        public void check(int round) {
            checkQueue();
        }
    }

    private static final class Poll extends OnTimers {
        private long sum;

        Poll(KeyFile keys, int keyGroups) {
            super(keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            register(0, n);
            sum = 0;
        }

        @Override
        public void run() throws Exception {
            inBlocks(n, this::rows);
        }

        private void rows(int from, int to) {
            long total = 0;
            for (int i = from; i < to; i++) {
                total += queue.poll().getKey();
            }
            sum += total;
        }

        @Override
        public void check(int round) {
            checkSum(sum);
        }
    }
}
