package statebackend.bench;

import java.util.List;
import org.apache.flink.runtime.state.CheckpointStateOutputStream;
import org.apache.flink.runtime.state.CheckpointStreamFactory;
import org.apache.flink.runtime.state.CheckpointedStateScope;
import org.apache.flink.runtime.state.StreamStateHandle;
import org.apache.flink.runtime.state.memory.ByteStreamStateHandle;

/** Checkpoint streams that count and discard, so that no disk is part of a measurement. */
final class DiscardingStreamFactory implements CheckpointStreamFactory {

    private volatile long written;

    /** Bytes of the stream that was closed last. */
    long written() {
        return written;
    }

    @Override
    public CheckpointStateOutputStream createCheckpointStateOutputStream(CheckpointedStateScope scope) {
        return new Discarding();
    }

    @Override
    public boolean canFastDuplicate(StreamStateHandle handle, CheckpointedStateScope scope) {
        return false;
    }

    @Override
    public List<StreamStateHandle> duplicate(List<StreamStateHandle> handles, CheckpointedStateScope scope) {
        throw new UnsupportedOperationException("nothing was kept");
    }

    private final class Discarding extends CheckpointStateOutputStream {

        private final ByteCounter bytes = new ByteCounter();

        @Override
        public void write(int b) {
            bytes.write(b);
        }

        @Override
        public void write(byte[] source, int offset, int length) {
            bytes.write(source, offset, length);
        }

        @Override
        public long getPos() {
            return bytes.total();
        }

        @Override
        public void flush() {}

        @Override
        public void sync() {}

        @Override
        public StreamStateHandle closeAndGetHandle() {
            written = bytes.total();
            // Flink wants a handle for what it wrote; nobody will read this one.
            return new ByteStreamStateHandle("discarded", new byte[0]);
        }

        @Override
        public void close() {}
    }
}
