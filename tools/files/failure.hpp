#pragma once

#include <string>
#include <string_view>

#include <narrows/narrows.hpp>

namespace narrows::files {

/// Throws Error{invalid_file, "subject: text"}; the subject is a file, or a file and one of its arrays.
[[noreturn]] void fail(std::string_view subject, std::string_view text);

/// 'text' fit for a terminal: control characters as \xNN, at most 80 bytes of it.
std::string printable(std::string_view text);

/// "file: array 'name'"
std::string subject_of(std::string_view file, std::string_view kind, std::string_view name);

/// "[2, 5]"
std::string text_of(const Dims& shape);

/// Refuses names that are empty or carry control characters.
void require_name(std::string_view file, std::string_view kind, std::string_view name);

}  // namespace narrows::files
