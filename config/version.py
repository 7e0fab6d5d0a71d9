"""The version of the project, for the build, the command line and `GET /version`."""

VERSION = "0.1.0"
