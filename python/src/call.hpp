#pragma once

#include <map>
#include <string>
#include <string_view>

#include "operand.hpp"

namespace narrows::python {

/// One call being put together by name: the operands are kept alive as long as it is.
class Call {
 public:
  /// Sets the tensor argument `operand.name()`.
  void set_operand(nb::object operand);
  /// Sets seed or offset to a number.
  void set_number(std::string_view name, std::uint64_t value);
  void set_family(std::string name);

  Options& options() { return options_; }

  /// Called without the GIL.
  void forward() const { narrows::forward(inputs_, outputs_, options_); }
  Explanation explain() const { return narrows::explain(inputs_, options_); }

 private:
  Inputs inputs_;
  Outputs outputs_;
  Options options_;
  std::string family_;
  std::map<std::string, nb::object, std::less<>> operands_;
};

}  // namespace narrows::python
