"""Amazon Web Services as the place of a stack. Light: only `build` and the components load the SDK."""
