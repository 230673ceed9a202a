include(CMakePackageConfigHelpers)

set(narrows_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/narrows")
install(TARGETS narrows EXPORT narrows_targets)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/narrows" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT narrows_targets NAMESPACE narrows:: DESTINATION "${narrows_package_dir}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/narrows-config.cmake.in"
  "${PROJECT_BINARY_DIR}/narrows-config.cmake" INSTALL_DESTINATION "${narrows_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/narrows-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/narrows-config.cmake" "${PROJECT_BINARY_DIR}/narrows-config-version.cmake"
  DESTINATION "${narrows_package_dir}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/narrows.pc.in" "${PROJECT_BINARY_DIR}/narrows.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/narrows.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
if(TARGET narrows_cli)
  install(TARGETS narrows_cli)
endif()
