package org.apache.flink.streaming.api.operators;

import java.lang.reflect.Proxy;
import org.apache.flink.runtime.metrics.groups.UnregisteredMetricGroups;
import org.apache.flink.runtime.state.VoidNamespace;
import org.apache.flink.runtime.state.VoidNamespaceSerializer;
import org.apache.flink.runtime.state.heap.HeapKeyedStateBackend;
import org.apache.flink.streaming.runtime.tasks.ProcessingTimeService;
import org.apache.flink.streaming.runtime.tasks.StreamTaskCancellationContext;

/** Builds Flink's real timer service over a heap backend. Its constructor is only seen from this package. */
public final class TimerServices {

    private TimerServices() {}

    /** A started service; a timer that fires sets the key of the backend and then calls the target. */
    public static <K> InternalTimerServiceImpl<K, VoidNamespace> create(
            HeapKeyedStateBackend<K> backend, Triggerable<K, VoidNamespace> target) {
        TimerSerializer<K, VoidNamespace> serializer =
                new TimerSerializer<>(backend.getKeySerializer(), VoidNamespaceSerializer.INSTANCE);
        InternalTimerServiceImpl<K, VoidNamespace> service = new InternalTimerServiceImpl<>(
                UnregisteredMetricGroups.createUnregisteredTaskMetricGroup().getIOMetricGroup(),
                backend.getKeyGroupRange(),
                keyContext(backend),
                noProcessingTime(),
                backend.create("processing", serializer),
                backend.create("event", serializer),
                StreamTaskCancellationContext.alwaysRunning());
        service.startTimerService(backend.getKeySerializer(), VoidNamespaceSerializer.INSTANCE, target);
        return service;
    }

    /** What an operator is to its timer service: the current key is that of its backend. */
    private static <K> KeyContext keyContext(HeapKeyedStateBackend<K> backend) {
        return new KeyContext() {
            @Override
            @SuppressWarnings("unchecked")
            public void setCurrentKey(Object key) {
                backend.setCurrentKey((K) key);
            }

            @Override
            public Object getCurrentKey() {
                return backend.getCurrentKey();
            }
        };
    }

    /** Only timers of processing time need one, and none is registered here. */
    private static ProcessingTimeService noProcessingTime() {
        return (ProcessingTimeService) Proxy.newProxyInstance(
                TimerServices.class.getClassLoader(),
                new Class<?>[] {ProcessingTimeService.class},
                (proxy, method, arguments) -> {
                    throw new UnsupportedOperationException(method.getName());
                });
    }
}
