package statebackend.bench;

import java.util.OptionalLong;
import org.apache.flink.runtime.state.VoidNamespace;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;
import org.apache.flink.streaming.api.operators.InternalTimer;
import org.apache.flink.streaming.api.operators.InternalTimerServiceImpl;
import org.apache.flink.streaming.api.operators.TimerServices;
import org.apache.flink.streaming.api.operators.Triggerable;

/** Timed operations on Flink's timer service with the key context of a heap backend, one timer per key. */
final class TimerServiceScenarios {

    private TimerServiceScenarios() {}

    private abstract static class OnService extends Scenario implements Triggerable<Long, VoidNamespace> {
        final int n;
        HeapKeyedStateBackend<Long> backend;
        InternalTimerServiceImpl<Long, VoidNamespace> timers;
        Long[] probe;

        /** The times of the timers, primitive on both sides of the call. */
        long[] times;

        private final KeyFile keys;
        private final int keyGroups;
        private long fired;

        OnService(KeyFile keys, int keyGroups) {
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
            if (backend != null) {
                backend.dispose();
            }
            backend = Backends.create(KeyMaker.LONGS.serializer, keyGroups);
            timers = TimerServices.create(backend, this);
            probe = KeyMaker.LONGS.make(keys.order(round));
            times = new long[n];
            for (int i = 0; i < n; i++) {
                times[i] = KeyFile.mix(probe[i]) >>> 1;
            }
            fired = 0;
        }

        @Override
        public final void run() throws Exception {
            timed();
        }

        abstract void timed() throws Exception;

        final void register(int from, int to) {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                timers.registerEventTimeTimer(VoidNamespace.INSTANCE, times[i]);
            }
        }

        /** Every timer fires. */
        final void fire() throws Exception {
            timers.advanceWatermark(Long.MAX_VALUE);
        }

        @Override
        public final void onEventTime(InternalTimer<Long, VoidNamespace> timer) {
            fired += backend.getCurrentKey();
        }

        @Override
        public final void onProcessingTime(InternalTimer<Long, VoidNamespace> timer) {
            throw new IllegalStateException("no timer of processing time was registered");
        }

        /** Lets all fire that have not: all keys had one timer. */
        @Override
        public void check(int round) throws Exception {
            fire();
            require(timers.numEventTimeTimers() == 0 && fired == keys.sum(), "the timers that fired");
        }

        /** The sum of the keys whose timers fired in the last round. */
        @Override
        public final OptionalLong contents() {
            return OptionalLong.of(fired);
        }
    }

    /** Set the key and register a timer. */
    static final class Register extends OnService {

        Register(KeyFile keys, int keyGroups) {
            super(keys, keyGroups);
        }

        @Override
        void timed() throws Exception {
            inBlocks(n, this::register);
        }

        @Override
        public void check(int round) throws Exception {
            require(timers.numEventTimeTimers() == n, "the timers in the queue");
            super.check(round);
        }
    }

    /** All timers fire in order, each with its key current. */
    static final class Fire extends OnService {

        Fire(KeyFile keys, int keyGroups) {
            super(keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            register(0, n);
        }

        @Override
        void timed() throws Exception {
            fire();
        }
    }

    /** Set the key, delete its timer and register a later one, as a session timeout does for every row. */
    static final class Move extends OnService {

        Move(KeyFile keys, int keyGroups) {
            super(keys, keyGroups);
        }

        @Override
        public void prepare(int round) throws Exception {
            super.prepare(round);
            register(0, n);
        }

        @Override
        void timed() throws Exception {
            inBlocks(n, this::move);
        }

        private void move(int from, int to) {
            for (int i = from; i < to; i++) {
                backend.setCurrentKey(probe[i]);
                timers.deleteEventTimeTimer(VoidNamespace.INSTANCE, times[i]);
                timers.registerEventTimeTimer(VoidNamespace.INSTANCE, times[i] + 1);
            }
        }

        @Override
        public void check(int round) throws Exception {
            require(timers.numEventTimeTimers() == n, "the timers in the queue");
            super.check(round);
        }
    }
}
