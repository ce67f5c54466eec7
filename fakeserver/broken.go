package fakeserver

import (
	"fmt"
	"time"
)

// Breakage names a server that gets it wrong; see [Broken].
type Breakage string

const (
	// SeenFlag remembers only that the key was used: every later answer is an empty 200, also after a decline. The ledger is
	// right; what the client makes of the empty answer is not.
	SeenFlag Breakage = "seen-flag"
	// FlatConflict remembers only that the key was used: every later answer is an empty 409, whatever became of the first.
	// The ledger is right; it is noticed by what the client makes of the 409.
	FlatConflict Breakage = "flat-conflict"
	// OtherReplay does not repeat the first answer: a replay of 201 is 200, its body says less, and nothing marks it.
	// The ledger is right; it is noticed in the answers.
	OtherReplay Breakage = "other-replay"
	// UnscopedKeys takes the equal keys of two callers for one: the second gets the answer of the first, and no effect.
	// It takes two Authorization values to notice.
	UnscopedKeys Breakage = "unscoped-keys"
	// KeysPerReplica is two replicas with a memory each: the next send of a key goes to the other one, and executes again.
	KeysPerReplica Breakage = "keys-per-replica"
	// ForgetsAtRestart keeps keys in the memory of the process. It takes a [Server.Restart] between two sends of a key to notice.
	ForgetsAtRestart Breakage = "forgets-at-restart"
	// ClaimsThenDies reserves the key first and never frees it: after a fault before the effect the key is in progress for
	// the whole retention (or Settings.Lease), and nothing was executed.
	ClaimsThenDies Breakage = "claims-then-dies"
	// EffectThenKey makes the effect first and remembers the key later: a fault between the two, or a second request at
	// the same time, executes again. Without such a fault or such concurrency nobody notices.
	EffectThenKey Breakage = "effect-then-key"
	// SellsTwice reads how many rooms are free and writes one less 50 ms later: two bookings at the same time, of different keys,
	// share the last room.
	SellsTwice Breakage = "sells-twice"
	// IgnoresKeys executes every request.
	IgnoresKeys Breakage = "ignores-keys"
)

// Broken gives the settings of a server that gets it wrong, as a negative control: a test that should notice this breakage and
// passes there proves nothing. Each breakage says what a test must do to notice; KeysPerReplica and IgnoresKeys take no
// more than a second send of a key, and a look at the ledger.
// They can be changed further before [Server.Apply]. An unknown name panics.
func Broken(b Breakage) Settings {
	switch b {
	case SeenFlag:
		return Settings{DoneStatus: 200}
	case FlatConflict:
		return Settings{DoneStatus: 409}
	case OtherReplay:
		return Settings{ReplayStatus: 200, ReplayBody: `{"status":"already processed"}`, ReplayHeader: "-"}
	case UnscopedKeys:
		return Settings{KeyPer: PerNobody}
	case KeysPerReplica:
		return Settings{Replicas: 2}
	case ForgetsAtRestart:
		return Settings{ForgetAtRestart: true}
	case ClaimsThenDies:
		return Settings{ClaimFirst: true}
	case EffectThenKey:
		return Settings{KeyLast: true}
	case SellsTwice:
		return Settings{ReadThenWrite: 50 * time.Millisecond}
	case IgnoresKeys:
		return Settings{IgnoreKeys: true}
	}
	panic(fmt.Sprintf("fakeserver: unknown breakage %q", string(b)))
}
