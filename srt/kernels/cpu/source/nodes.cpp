#include "nodes.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#if defined(__linux__)
#include <sched.h>
#endif

namespace umbel {
namespace {

// A file of numbers as the kernel lists them, "0-3,8": empty where there is no such file.
std::vector<int> read_list(const std::string& path) {
    std::vector<int> numbers;
    std::ifstream file(path);
    for (std::string range; std::getline(file, range, ',');) {
        std::istringstream text(range);
        int first, last;
        if (!(text >> first)) break;  // an empty list
        if (text.get() != '-' || !(text >> last)) last = first;
        for (; first <= last; first++) numbers.push_back(first);
    }
    return numbers;
}

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
#endif
    return cpus;
}

}  // namespace

std::vector<NodeCpu> cpus_by_node(const char* sysfs, const std::vector<int>& allowed) {
    std::vector<NodeCpu> cpus;
    std::string nodes = std::string(sysfs) + "/devices/system/node/";
    for (int node : read_list(nodes + "online"))
        for (int cpu : read_list(nodes + "node" + std::to_string(node) + "/cpulist"))
            if (std::find(allowed.begin(), allowed.end(), cpu) != allowed.end()) cpus.push_back({node, cpu});
    if (cpus.empty() || cpus.front().node == cpus.back().node) cpus.clear();
    return cpus;
}

Nodes::Nodes(const char* sysfs, int threads) : cpus_(cpus_by_node(sysfs, allowed_cpus())), threads_(threads) {}

// Where the system refuses, the thread runs on all CPUs, as it would with one node.
void Nodes::bind_to([[maybe_unused]] int node, [[maybe_unused]] pthread_t thread) const {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const NodeCpu& each : cpus_)
        if (each.node == node) CPU_SET(each.cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
#endif
}

}  // namespace umbel

extern "C" {

// `cpus_by_node` for tests → how many. nodes, cpus: [count].
long umbel_cpus_by_node(const char* sysfs, const int32_t* allowed, long count, int32_t* nodes, int32_t* cpus) {
    std::vector<umbel::NodeCpu> found = umbel::cpus_by_node(sysfs, {allowed, allowed + count});
    for (size_t i = 0; i < found.size(); i++) nodes[i] = found[i].node, cpus[i] = found[i].cpu;
    return (long)found.size();
}

}  // extern "C"
