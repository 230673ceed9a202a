// One form for every refusal: "argument: value: rule; nearest legal: value".
#pragma once

#include "core/types.hpp"

namespace narrows {

/// `nearest` is left out where no single value is nearest.
template <class Value>
[[noreturn]] void refuse(ErrorCode code, std::string_view argument, const Value& value, std::string_view rule,
                         std::string_view nearest = {}) {
  std::string message = text(argument, ": ", value, ": ", rule);
  if (!nearest.empty()) message += text("; nearest legal: ", nearest);
  throw Error(code, message);
}
template <class Value>
[[noreturn]] void refuse_value(std::string_view argument, const Value& value, std::string_view rule,
                               std::string_view nearest = {}) {
  refuse(ErrorCode::invalid_value, argument, value, rule, nearest);
}
template <class Value>
[[noreturn]] void refuse_type(std::string_view argument, const Value& value, std::string_view rule,
                              std::string_view nearest = {}) {
  refuse(ErrorCode::invalid_type, argument, value, rule, nearest);
}

}  // namespace narrows
