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
  void forward() const { narrows::forward(inputs(), {tensors_.o, tensors_.lse}, options_); }
  void prepare() const { narrows::prepare(inputs(), options_); }
  void prepare_backward() const { narrows::prepare_backward(inputs(), options_); }
  void backward() const { narrows::backward(tensors_, gradients_, options_); }
  std::int64_t workspace_size() const { return narrows::workspace_size(inputs(), options_); }
  std::int64_t backward_workspace_size() const { return narrows::backward_workspace_size(inputs(), options_); }
  Explanation explain() const { return narrows::explain(inputs(), options_); }

 private:
  Inputs inputs() const { return {tensors_.q, tensors_.k, tensors_.v}; }

  BackwardInputs tensors_;  // o and lse are forward's results
  Gradients gradients_;
  Options options_;
  std::string family_;
  std::map<std::string, nb::object, std::less<>> operands_;
};

}  // namespace narrows::python
