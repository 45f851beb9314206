// The list of cases that the gates of the ops run, made one at a time.
#pragma once

#include "cpp/gate/case.h"

#include <functional>
#include <string>
#include <vector>

namespace flashnext::gate {

struct Planned {
  std::string gate;
  std::function<Case()> make;
};
std::vector<Planned> op_plan();

}  // namespace flashnext::gate
