// Package interop has no code: its tests run idem with clients and against
// servers that nobody here wrote. README.md says what each does differently.
package interop
