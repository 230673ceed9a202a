// Rows of tests/cases.jsonl, each on each GPU family that must accept it.
#pragma once

#include "tests/support/cases.hpp"

#include <algorithm>
#include <cctype>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace narrows::test {

struct FamilyCase {
  std::size_t index = 0;
  std::string family;
};

inline void PrintTo(const FamilyCase& row, std::ostream* out) { *out << "row " << row.index << " on " << row.family; }

/// wanted: the families in question, empty = all.
inline std::vector<FamilyCase> family_cases(Operation operation, const std::vector<std::string>& wanted = {}) {
  std::vector<FamilyCase> all;
  for (std::size_t index = 0; index < case_count(); ++index)
    for (const std::string& family : case_families(index, DeviceKind::cuda, operation))
      if (wanted.empty() || std::find(wanted.begin(), wanted.end(), family) != wanted.end())
        all.push_back({index, family});
  return all;
}

inline std::string case_name(const testing::TestParamInfo<FamilyCase>& info) {
  std::string name = case_label(info.param.index) + "_" + std::to_string(info.param.index);
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return info.param.family + "_" + name;
}

}  // namespace narrows::test
