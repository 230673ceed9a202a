#include "plan/sm80_merge.hpp"

#include "plan/sm80_shared.hpp"

namespace narrows {

Program merge_program(Element element) {
  sm80::Config config("shared/merge_args.h");
  config.element("kElement", element);
  return {"merge_sm80.cu", "merge_sm80", config.text(), element == Element::fp32, true};
}

std::vector<Program> planned_merge_programs() {
  return {merge_program(Element::bf16), merge_program(Element::fp16), merge_program(Element::fp32)};
}

}  // namespace narrows
