#include "plan/sm80_merge.hpp"

#include "plan/sm80_shared.hpp"

namespace narrows {

Program merge_program(Element element) {
  sm80::Config config("shared/merge_args.h");
  config.element("kElement", element);
  return {"merge_sm80.cu", "merge_sm80", config.text(), element == Element::fp32, true};
}

Program merge_backward_program(Element element, MergeStep step) {
  constexpr std::array<std::string_view, 3> kSteps{"rows", "parts", "sinks"};
  sm80::Config config("shared/merge_args.h");
  config.element("kElement", element);
  config.add(text("constexpr MergeStep kMergeStep = MergeStep::", kSteps[static_cast<std::size_t>(step)], ";\n"));
  return {"merge_backward_sm80.cu", "merge_backward_sm80", config.text(), element == Element::fp32, true};
}

std::vector<Program> planned_merge_programs() {
  std::vector<Program> programs;
  for (const Element element : {Element::bf16, Element::fp16, Element::fp32}) {
    programs.push_back(merge_program(element));
    for (const MergeStep step : {MergeStep::rows, MergeStep::parts, MergeStep::sinks})
      programs.push_back(merge_backward_program(element, step));
  }
  return programs;
}

}  // namespace narrows
