"""The backends of a dstack server as a place: dstack launches machines wherever one of them sells what a fleet asks for."""
