package statebackend.bench;

import java.lang.management.GarbageCollectorMXBean;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.List;
import org.apache.flink.runtime.util.EnvironmentInformation;

/** The first line of a run: what the figures were measured on, and proof of the order of the keys. */
public final class Header {

    private Header() {}

    public static void print(String suite, KeyFile keys) {
        List<String> collectors = new ArrayList<>();
        for (GarbageCollectorMXBean collector : ManagementFactory.getGarbageCollectorMXBeans()) {
            collectors.add(collector.getName());
        }
        new Json()
                .put("record", "header")
                .put("suite", suite)
                .put("flink_version", EnvironmentInformation.getVersion())
                .put("java_version", System.getProperty("java.version"))
                .put("vm", System.getProperty("java.vm.name"))
                .put("vm_flags", ManagementFactory.getRuntimeMXBean().getInputArguments())
                .put("collectors", collectors)
                .put("heap_bytes", Runtime.getRuntime().maxMemory())
                .put("processors", Runtime.getRuntime().availableProcessors())
                // Other work on the machine takes the core that G1 refines and collects on.
                .put("load_average", ManagementFactory.getOperatingSystemMXBean().getSystemLoadAverage())
                .put("n", keys.size())
                .put("order_checksum", KeyFile.checksum(keys.order(0)))
                .print();
    }
}
