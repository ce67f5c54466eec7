// Package modeltest has a model test of idem: random faults, keys, methods,
// redirects, cancellations and repeated calls, against a few invariants. It is
// a module of its own, so that users of idem do not depend on rapid.
package modeltest
