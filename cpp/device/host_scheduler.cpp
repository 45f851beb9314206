#include "cpp/device/host_scheduler.h"

#include <algorithm>
#include <cstring>

namespace flashnext {

std::size_t HostScheduler::Random::below(std::size_t n) noexcept {
  if (n <= 1) return 0;
  std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) % n;
}

StreamId HostScheduler::create_stream() {
  queues_.push_back(std::make_unique<Queue>());
  return static_cast<StreamId>(queues_.size());
}

void HostScheduler::destroy_stream(StreamId stream) noexcept {
  try {
    drain(stream);
  } catch (...) {
    fail(std::current_exception());
  }
  queues_[stream - 1].reset();
}

void HostScheduler::push(StreamId stream, Work work) {
  Queue& q = *queues_[stream - 1];
  if (work.kind == Work::Kind::kOp) work.from = q.args.copy(work.from, work.bytes);
  q.work.push_back(work);
  ++q.pushed;
  if (work.kind == Work::Kind::kReplay) ++work.graph->queued;
}

GraphId HostScheduler::add_graph(std::unique_ptr<HostGraph> graph) {
  graphs_.push_back(std::move(graph));
  return static_cast<GraphId>(graphs_.size());
}

HostGraph* HostScheduler::find_graph(GraphId graph) const noexcept {
  if (!known(graphs_, graph) || graphs_[graph - 1]->destroyed) return nullptr;
  return graphs_[graph - 1].get();
}

void HostScheduler::destroy_graph(GraphId graph) noexcept {
  graphs_[graph - 1]->destroyed = true;
  if (graphs_[graph - 1]->queued == 0) graphs_[graph - 1].reset();
}

void HostScheduler::end_replay(HostGraph& graph) noexcept {
  graph.runner = 0;
  if (--graph.queued > 0 || !graph.destroyed) return;
  for (auto& owner : graphs_) {
    if (owner.get() == &graph) owner.reset();
  }
}

const Work* HostScheduler::user_of(HostMemory::Range range, StreamId* stream) const noexcept {
  for (std::size_t s = 0; s < queues_.size(); ++s) {
    if (queues_[s] == nullptr) continue;
    const Queue& q = *queues_[s];
    for (std::size_t i = q.head; i < q.work.size(); ++i) {
      if (!q.work[i].touches(range)) continue;
      *stream = static_cast<StreamId>(s + 1);
      return &q.work[i];
    }
  }
  return nullptr;
}

void HostScheduler::mark_stale(HostMemory::Range range, const std::string& why) {
  for (const auto& graph : graphs_) {
    if (graph != nullptr && graph->stale.empty() && graph->touches(range)) graph->stale = why;
  }
}

void HostScheduler::fail(std::exception_ptr error) noexcept {
  if (!failed_) {
    failed_ = true;
    unreported_ = error;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      failure_ = e.what();
    } catch (...) {
      failure_ = "unknown exception";
    }
  }
  for (const auto& q : queues_) {
    if (q == nullptr) continue;
    for (; !q->idle(); pop(*q)) {
      const Work& work = q->work[q->head];
      if (work.kind == Work::Kind::kReplay) end_replay(*work.graph);
    }
  }
}

void HostScheduler::pop(Queue& q) noexcept {
  ++q.done;
  if (++q.head < q.work.size()) return;
  q.work.clear();
  q.head = 0;
  q.args.reset();
}

// How many pieces of work the front of a stream offers now. Passes waits that are met, starts and
// ends replays.
std::size_t HostScheduler::ready(StreamId stream) {
  Queue& q = *queues_[stream - 1];
  while (!q.idle()) {
    const Work& front = q.work[q.head];
    if (front.kind == Work::Kind::kWait) {
      if (!reached(front.stream, front.count)) return 0;
      pop(q);
      continue;
    }
    if (front.kind != Work::Kind::kReplay) return 1;
    HostGraph& graph = *front.graph;
    if (!graph.running()) graph.start(stream);
    if (graph.runner != stream) return 0;
    if (!graph.ready.empty()) return graph.ready.size();
    pop(q);
    end_replay(graph);
  }
  return 0;
}

void HostScheduler::run_one(StreamId stream, std::size_t pick) {
  Queue& q = *queues_[stream - 1];
  const Work& front = q.work[q.head];
  if (front.kind == Work::Kind::kReplay) {
    HostGraph& graph = *front.graph;
    const std::uint32_t node = graph.ready[pick];
    graph.ready[pick] = graph.ready.back();
    graph.ready.pop_back();
    execute(graph.nodes[node].work);
    // NOTE: a failure has emptied the queues, and the graph may be gone.
    if (!failed_) graph.finish(node);
    return;
  }
  execute(front);
  if (!failed_) pop(q);
}

// Runs a random piece of ready work of any stream but `except`; false when there is none.
bool HostScheduler::run_any(StreamId except) {
  std::size_t total = 0;
  for (StreamId s = 1; s <= queues_.size(); ++s) {
    if (s != except && queues_[s - 1] != nullptr) total += ready(s);
  }
  if (total == 0) return false;
  std::size_t pick = random_.below(total);
  for (StreamId s = 1; s <= queues_.size(); ++s) {
    if (s == except || queues_[s - 1] == nullptr) continue;
    const std::size_t n = ready(s);
    if (pick < n) {
      run_one(s, pick);
      return true;
    }
    pick -= n;
  }
  return false;
}

// Runs one piece of work that `stream` needs to get on: its own, or that of the stream it waits
// for. Edges point to earlier entries only, so the chase ends.
void HostScheduler::run_towards(StreamId stream) {
  for (;;) {
    const std::size_t n = ready(stream);
    if (n > 0) {
      run_one(stream, random_.below(n));
      return;
    }
    const Queue& q = *queues_[stream - 1];
    if (q.idle()) return;
    const Work& front = q.work[q.head];
    stream = front.kind == Work::Kind::kWait ? front.stream : front.graph->runner;
  }
}

void HostScheduler::drain(StreamId stream) {
  const Queue& q = *queues_[stream - 1];
  const std::size_t manner = random_.below(3);
  while (!q.idle()) {
    const bool other = manner == 1 ? run_any(0) : manner == 2 ? run_any(stream) : false;
    if (!other) run_towards(stream);
    ready(stream);
  }
  if (manner == 1) {
    for (std::size_t more = random_.below(8); more > 0 && run_any(0); --more) {
    }
  }
}

void HostScheduler::execute(const Work& work) noexcept {
  try {
    switch (work.kind) {
      case Work::Kind::kOp:
        host::run(work.op, work.from, context_);
        break;
      case Work::Kind::kCopy:
        if (work.bytes > 0) std::memcpy(work.to, work.from, work.bytes);
        break;
      case Work::Kind::kZero:
        if (work.bytes > 0) std::memset(work.to, 0, work.bytes);
        break;
      case Work::Kind::kWait:
      case Work::Kind::kReplay:
        throw LogicError("host device: a queue entry that cannot be executed");
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

}  // namespace flashnext
