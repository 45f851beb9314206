#include "cpp/device/host_capture.h"

#include <algorithm>

namespace flashnext {

void HostCapture::begin(StreamId origin) {
  origin_ = origin;
  ++serial_;
  graph_ = std::make_unique<HostGraph>();
  tails_[origin] = {};
}

void HostCapture::add(StreamId stream, const Work& work) {
  const auto index = static_cast<std::uint32_t>(graph_->nodes.size());
  Nodes& tail = tails_.at(stream);
  HostGraph::Node node{work, 0, 0, static_cast<std::uint32_t>(tail.size())};
  if (work.kind == Work::Kind::kOp) node.work.from = graph_->args.copy(work.from, work.bytes);
  graph_->nodes.push_back(node);
  predecessors_.push_back(std::move(tail));
  tail = {index};
}

void HostCapture::join(StreamId stream, const Nodes& nodes) {
  Nodes& tail = tails_[stream];
  Nodes all;
  std::set_union(tail.begin(), tail.end(), nodes.begin(), nodes.end(), std::back_inserter(all));
  tail = std::move(all);
}

std::unique_ptr<HostGraph> HostCapture::finish() {
  // Everything that the origin's last nodes depend on. Edges point backwards, so one pass does it.
  std::vector<bool> joined(graph_->nodes.size(), false);
  for (std::uint32_t node : tails_.at(origin_)) joined[node] = true;
  for (std::size_t i = joined.size(); i-- > 0;) {
    if (!joined[i]) continue;
    for (std::uint32_t p : predecessors_[i]) joined[p] = true;
  }
  for (const auto& [stream, tail] : tails_) {
    for (std::uint32_t node : tail) {
      if (joined[node]) continue;
      const LogicError error("capture of stream " + std::to_string(origin_) +
                             " ends with unjoined work: stream " + std::to_string(stream) +
                             " (last node: " + name_of(graph_->nodes[node].work) +
                             ") must be joined back by an event");
      abort();
      throw error;
    }
  }
  for (std::size_t i = 0; i < predecessors_.size(); ++i) {
    for (std::uint32_t p : predecessors_[i]) ++graph_->nodes[p].successors;
  }
  std::uint32_t first = 0;
  for (HostGraph::Node& node : graph_->nodes) {
    node.first = first;
    first += node.successors;
    node.successors = 0;
  }
  graph_->edges.resize(first);
  for (std::size_t i = 0; i < predecessors_.size(); ++i) {
    for (std::uint32_t p : predecessors_[i]) {
      HostGraph::Node& node = graph_->nodes[p];
      graph_->edges[node.first + node.successors++] = static_cast<std::uint32_t>(i);
    }
  }
  std::unique_ptr<HostGraph> graph = std::move(graph_);
  abort();
  return graph;
}

void HostCapture::abort() noexcept {
  graph_.reset();
  predecessors_.clear();
  tails_.clear();
  origin_ = 0;
}

}  // namespace flashnext
