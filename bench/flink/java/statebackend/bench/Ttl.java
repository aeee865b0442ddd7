package statebackend.bench;

import java.time.Duration;
import org.apache.flink.api.common.state.StateDescriptor;
import org.apache.flink.api.common.state.StateTtlConfig;

/** Time-to-live of a measured state. Nothing expires during a run: what is measured is the cost of having it. */
enum Ttl {
    /** No time-to-live. */
    OFF,
    /** As Flink sets it up unless told otherwise: incremental clean-up of five entries per access. */
    DEFAULT_CLEANUP,
    /** Time stamps only: clean-up in the background disabled. */
    NO_CLEANUP;

    private static final Duration LONGER_THAN_ANY_RUN = Duration.ofDays(1);

    static Ttl named(String name) {
        switch (name) {
            case "off":
                return OFF;
            case "default":
                return DEFAULT_CLEANUP;
            case "no_cleanup":
                return NO_CLEANUP;
            default:
                throw new IllegalArgumentException("ttl is off, default or no_cleanup, not " + name);
        }
    }

    <D extends StateDescriptor<?, ?>> D on(D descriptor) {
        if (this != OFF) {
            StateTtlConfig.Builder config = StateTtlConfig.newBuilder(LONGER_THAN_ANY_RUN);
            descriptor.enableTimeToLive(
                    this == NO_CLEANUP ? config.disableCleanupInBackground().build() : config.build());
        }
        return descriptor;
    }
}
