package statebackend.bench;

import java.util.function.IntFunction;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.api.common.typeutils.base.StringSerializer;

/**
 * Makes key objects from the numbers of the key file.
 *
 * <p>Every array it fills holds fresh objects: a record that comes off the wire is never the object that was
 * inserted, so a lookup must compare by value, and a String must compute its hash.
 */
public abstract class KeyMaker<K> {

    public final TypeSerializer<K> serializer;

    private final IntFunction<K[]> newArray;

    private KeyMaker(TypeSerializer<K> serializer, IntFunction<K[]> newArray) {
        this.serializer = serializer;
        this.newArray = newArray;
    }

    public abstract K make(long key);

    public final K[] make(long[] order) {
        K[] made = newArray.apply(order.length);
        for (int i = 0; i < order.length; i++) {
            made[i] = make(order[i]);
        }
        return made;
    }

    public static KeyMaker<?> named(String keyType) {
        switch (keyType) {
            case "long":
                return LONGS;
            case "string":
                return STRINGS;
            default:
                throw new IllegalArgumentException("key type is long or string, not " + keyType);
        }
    }

    public static final KeyMaker<Long> LONGS = new KeyMaker<>(LongSerializer.INSTANCE, Long[]::new) {
        @Override
        public Long make(long key) {
            return key;
        }
    };

    public static final KeyMaker<String> STRINGS = new KeyMaker<>(StringSerializer.INSTANCE, String[]::new) {
        @Override
        public String make(long key) {
            return "user-" + key;
        }
    };
}
