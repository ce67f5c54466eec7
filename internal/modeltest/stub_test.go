package modeltest
import _ "pgregory.net/rapid"
import _ "github.com/stretchr/testify/require"
import _ "github.com/idem-go/idem"
