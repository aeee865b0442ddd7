package statebackend.bench;

import java.util.Collections;
import org.apache.flink.api.common.ExecutionConfig;
import org.apache.flink.api.common.state.State;
import org.apache.flink.api.common.state.StateDescriptor;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.core.fs.CloseableRegistry;
import org.apache.flink.runtime.state.KeyGroupRange;
import org.apache.flink.runtime.state.LocalRecoveryConfig;
import org.apache.flink.runtime.state.UncompressedStreamCompressionDecorator;
import org.apache.flink.runtime.state.VoidNamespace;
import org.apache.flink.runtime.state.VoidNamespaceSerializer;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackendBuilder;
import org.apache.flink.runtime.state.heap.HeapPriorityQueueSetFactory;
import org.apache.flink.runtime.state.metrics.LatencyTrackingStateConfig;
import org.apache.flink.runtime.state.metrics.SizeTrackingStateConfig;
import org.apache.flink.runtime.state.ttl.TtlTimeProvider;

/** Builds Flink's real heap backend, as an operator that owns every key group would have it. */
final class Backends {

    /** The initial capacity that HashMapStateBackend gives its timer queues. */
    private static final int TIMER_QUEUE_CAPACITY = 128;

    private Backends() {}

    static <K> HeapKeyedStateBackend<K> create(TypeSerializer<K> keySerializer, int keyGroups) throws Exception {
        KeyGroupRange range = KeyGroupRange.of(0, keyGroups - 1);
        return new HeapKeyedStateBackendBuilder<>(
                        null, // queryable state, which no descriptor here asks for
                        keySerializer,
                        Backends.class.getClassLoader(),
                        keyGroups,
                        range,
                        new ExecutionConfig(),
                        TtlTimeProvider.DEFAULT,
                        LatencyTrackingStateConfig.disabled(),
                        SizeTrackingStateConfig.disabled(),
                        Collections.emptyList(),
                        UncompressedStreamCompressionDecorator.INSTANCE,
                        LocalRecoveryConfig.BACKUP_AND_RECOVERY_DISABLED,
                        new HeapPriorityQueueSetFactory(range, keyGroups, TIMER_QUEUE_CAPACITY),
                        true, // asynchronous snapshots: copy-on-write maps
                        new CloseableRegistry())
                .build();
    }

    /** The handle a user function would hold. */
    static <S extends State> S state(HeapKeyedStateBackend<?> backend, StateDescriptor<S, ?> descriptor)
            throws Exception {
        return backend.getPartitionedState(VoidNamespace.INSTANCE, VoidNamespaceSerializer.INSTANCE, descriptor);
    }
}
