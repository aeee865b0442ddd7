package statebackend.bench;

import java.io.OutputStream;

/**
 * Takes bytes into a small buffer and forgets them. The copy is kept on purpose: Flink's own checkpoint stream
 * buffers too, and a sink that did nothing at all would flatter the writing of a snapshot.
 */
public final class ByteCounter extends OutputStream {

    private final byte[] buffer = new byte[1 << 16];
    private int position;
    private long total;

    @Override
    public void write(int b) {
        if (position == buffer.length) {
            position = 0;
        }
        buffer[position++] = (byte) b;
        total++;
    }

    @Override
    public void write(byte[] bytes, int offset, int length) {
        total += length;
        while (length > 0) {
            if (position == buffer.length) {
                position = 0;
            }
            int part = Math.min(length, buffer.length - position);
            System.arraycopy(bytes, offset, buffer, position, part);
            position += part;
            offset += part;
            length -= part;
        }
    }

    public long total() {
        return total;
    }
}
