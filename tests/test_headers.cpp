// CMake wants a source for the target that owns the precompiled headers of the tests.
