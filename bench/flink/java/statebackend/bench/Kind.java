package statebackend.bench;

import java.math.BigDecimal;
import java.time.Instant;
import java.time.LocalDate;
import java.time.temporal.ChronoUnit;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.common.typeutils.base.BigDecSerializer;
import org.apache.flink.api.common.typeutils.base.InstantSerializer;
import org.apache.flink.api.common.typeutils.base.ListSerializer;
import org.apache.flink.api.common.typeutils.base.LocalDateSerializer;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.api.common.typeutils.base.MapSerializer;
import org.apache.flink.api.common.typeutils.base.StringSerializer;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.typeutils.runtime.RowSerializer;
import org.apache.flink.api.java.typeutils.runtime.TupleSerializer;
import org.apache.flink.types.Row;

/**
 * A type under measurement, by the name that Spark gives it: how an object is made from a number, and which numbers
 * are in an object. The other side has the same in {@code bench/state/kinds.py}.
 */
abstract class Kind<T> {

    /** Microseconds of the first timestamp, and between two. */
    private static final long EPOCH_MICROS = 1_700_000_000_000_000L;

    private static final long STEP_MICROS = 1009;

    private static final int DAYS = 20_000;
    private static final int SCALE = 2;
    private static final String PREFIX = "user-";
    private static final String[] NAMES = {"a", "b", "c"};

    final TypeSerializer<T> serializer;

    private Kind(TypeSerializer<T> serializer) {
        this.serializer = serializer;
    }

    /** A fresh object. */
    abstract T make(long number);

    /** The numbers in an object. */
    abstract long[] numbers(T made);

    /** Fresh objects of these numbers, each with something added. */
    final Object[] make(long[] numbers, long plus) {
        Object[] made = new Object[numbers.length];
        for (int i = 0; i < made.length; i++) {
            made[i] = make(numbers[i] + plus);
        }
        return made;
    }

    static Kind<?> named(String name) {
        switch (name) {
            case "bigint":
                return BIGINT;
            case "string":
                return STRING;
            case "timestamp":
                return TIMESTAMP;
            case "date":
                return DATE;
            case "decimal(18,2)":
                return DECIMAL;
            case "struct<a:bigint,b:bigint>":
                return STRUCT_OF_NUMBERS;
            case "struct<a:bigint,b:string>":
                return STRUCT_WITH_STRING;
            case "array<bigint>":
                return ARRAY;
            case "map<string,bigint>":
                return MAP;
            default:
                throw new IllegalArgumentException("no such type: " + name);
        }
    }

    private static long numberOf(String text) {
        Scenario.require(text.startsWith(PREFIX), "a string");
        return Long.parseLong(text.substring(PREFIX.length()));
    }

    static final Kind<Long> BIGINT = new Kind<>(LongSerializer.INSTANCE) {
        @Override
        Long make(long number) {
            return number;
        }

        @Override
        long[] numbers(Long made) {
            return new long[] {made};
        }
    };

    private static final Kind<String> STRING = new Kind<>(StringSerializer.INSTANCE) {
        @Override
        String make(long number) {
            return PREFIX + number;
        }

        @Override
        long[] numbers(String made) {
            return new long[] {numberOf(made)};
        }
    };

    private static final Kind<Instant> TIMESTAMP = new Kind<>(InstantSerializer.INSTANCE) {
        @Override
        Instant make(long number) {
            return Instant.EPOCH.plus(EPOCH_MICROS + number * STEP_MICROS, ChronoUnit.MICROS);
        }

        @Override
        long[] numbers(Instant made) {
            return new long[] {ChronoUnit.MICROS.between(Instant.EPOCH, made)};
        }
    };

    private static final Kind<LocalDate> DATE = new Kind<>(LocalDateSerializer.INSTANCE) {
        @Override
        LocalDate make(long number) {
            return LocalDate.ofEpochDay(Math.floorMod(number, DAYS));
        }

        @Override
        long[] numbers(LocalDate made) {
            return new long[] {made.toEpochDay()};
        }
    };

    private static final Kind<BigDecimal> DECIMAL = new Kind<>(BigDecSerializer.INSTANCE) {
        @Override
        BigDecimal make(long number) {
            return BigDecimal.valueOf(number, SCALE);
        }

        @Override
        long[] numbers(BigDecimal made) {
            Scenario.require(made.scale() == SCALE, "the scale of a decimal");
            return new long[] {made.unscaledValue().longValueExact()};
        }
    };

    @SuppressWarnings("unchecked")
    private static final Class<Tuple2<Long, Long>> TUPLE_CLASS =
            (Class<Tuple2<Long, Long>>) (Class<?>) Tuple2.class;

    private static final Kind<Tuple2<Long, Long>> STRUCT_OF_NUMBERS =
            new Kind<>(new TupleSerializer<>(
                    TUPLE_CLASS, new TypeSerializer<?>[] {LongSerializer.INSTANCE, LongSerializer.INSTANCE})) {
                @Override
                Tuple2<Long, Long> make(long number) {
                    return Tuple2.of(number, number + 1);
                }

                @Override
                long[] numbers(Tuple2<Long, Long> made) {
                    return new long[] {made.f0, made.f1};
                }
            };

    private static final Kind<Row> STRUCT_WITH_STRING =
            new Kind<>(new RowSerializer(
                    new TypeSerializer<?>[] {LongSerializer.INSTANCE, StringSerializer.INSTANCE})) {
                @Override
                Row make(long number) {
                    return Row.of(number, PREFIX + number);
                }

                @Override
                long[] numbers(Row made) {
                    return new long[] {made.<Long>getFieldAs(0), numberOf(made.getFieldAs(1))};
                }
            };

    private static final Kind<List<Long>> ARRAY = new Kind<>(new ListSerializer<>(LongSerializer.INSTANCE)) {
        @Override
        List<Long> make(long number) {
            List<Long> made = new ArrayList<>(NAMES.length);
            for (int i = 0; i < NAMES.length; i++) {
                made.add(number + i);
            }
            return made;
        }

        @Override
        long[] numbers(List<Long> made) {
            return made.stream().mapToLong(Long::longValue).toArray();
        }
    };

    private static final Kind<Map<String, Long>> MAP =
            new Kind<>(new MapSerializer<>(StringSerializer.INSTANCE, LongSerializer.INSTANCE)) {
                @Override
                Map<String, Long> make(long number) {
                    Map<String, Long> made = new HashMap<>();
                    for (int i = 0; i < NAMES.length; i++) {
                        made.put(NAMES[i], number + i);
                    }
                    return made;
                }

                @Override
                long[] numbers(Map<String, Long> made) {
                    Scenario.require(made.size() == NAMES.length, "the size of a map");
                    long[] numbers = new long[NAMES.length];
                    for (int i = 0; i < NAMES.length; i++) {
                        numbers[i] = made.get(NAMES[i]);
                    }
                    return numbers;
                }
            };
}
