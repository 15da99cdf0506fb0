"""Models and calls of other libraries under this library's masks. A module imports at most the library it is named after."""
