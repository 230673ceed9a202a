# Writes OUTPUT, C++ with the text of the kernels: cmake -DSOURCE_DIR=src -DFILES=shared/a.h,kernels/b.cu -DOUTPUT=... -P
# The delimiter of the literals is one that no line of device text ends in.
string(REPLACE "," ";" files "${FILES}")
set(entries "")
foreach(name IN LISTS files)
  file(READ "${SOURCE_DIR}/${name}" text)
  string(APPEND entries "    {\"${name}\", R\"narrows(${text})narrows\"sv},\n")
endforeach()
file(WRITE "${OUTPUT}" "#include \"cuda/sources.hpp\"

namespace narrows::cuda {

std::span<const SourceFile> embedded_sources() {
  using namespace std::string_view_literals;  // a length that is known: clang gives up counting a million characters
  static constexpr SourceFile kFiles[] = {
${entries}  };
  return kFiles;
}

}  // namespace narrows::cuda
")
