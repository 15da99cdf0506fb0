"""Other libraries' models under this library's masks. Each module needs the library that it is named after."""
