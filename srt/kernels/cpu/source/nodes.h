// Nodes of memory (NUMA): CPUs, and the memory that is near them. Where the process may use CPUs of several, the threads
// of the team stay on one node each, and a matrix lies where it is read. With one node nothing is bound or placed.
#pragma once

#include <pthread.h>

#include <thread>
#include <vector>

namespace umbel {

struct NodeCpu {
    int node, cpu;
};

// The CPUs among `allowed`, node by node as `sysfs` (/sys) lists them. Empty: they are all of one node, or the system lists
// no nodes.
std::vector<NodeCpu> cpus_by_node(const char* sysfs, const std::vector<int>& allowed);

// The nodes of a team of threads, which are spread over them in order, as many for each CPU everywhere.
class Nodes {
  public:
    Nodes() = default;
    Nodes(const char* sysfs, int threads);  // of the CPUs that the calling thread may run on

    // Where there are several: a thread runs on the node of this rank from now on.
    void bind(int rank, pthread_t thread) const {
        if (!cpus_.empty()) bind_to(node_of(rank), thread);
    }

    // body(first rank, end) once for each node, on its CPUs; nothing where there is one node.
    template <class Body>
    void each(const Body& body) const {
        std::vector<std::thread> threads;
        for (int first = 0, end; !cpus_.empty() && first < threads_; first = end) {
            for (end = first + 1; end < threads_ && node_of(end) == node_of(first);) end++;
            threads.emplace_back([this, &body, first, end] {
                bind(first, pthread_self());
                body(first, end);
            });
        }
        for (std::thread& thread : threads) thread.join();
    }

  private:
    int node_of(int rank) const { return cpus_[(size_t)rank * cpus_.size() / threads_].node; }
    void bind_to(int node, pthread_t thread) const;

    std::vector<NodeCpu> cpus_;
    int threads_ = 1;
};

}  // namespace umbel
