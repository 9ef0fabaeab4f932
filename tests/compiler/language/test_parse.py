"""Text -> statement, and the full text of every message about text that is none."""

from __future__ import annotations

import ast
import keyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import messages
from statements import Case, examples, statements

from insum_ops.compiler.language.errors import InsumError, ParseError
from insum_ops.compiler.language.ir import Access, Const, Number, Statement, Var, walk
from insum_ops.compiler.language.parse import DEEPEST, LONGEST, parse

pytestmark = pytest.mark.cpu

EVERY = ("sum", "max", "min")

MESSAGES = messages(
    """
an index has no arithmetic; put the computed positions in an index tensor
    C[i] += A[i+1]
               ^

an index has no arithmetic; put the computed positions in an index tensor
    C[i] += A[AK[i] * 2]
                    ^

factors are joined by '*' alone; for a difference, pass the first result to a second call, with += and a factor of -1
    C[i] += A[i] - B[i]
                 ^

factors are joined by '*' alone; for a sum, pass the first result to a second call, whose += adds to it
    C[i] += A[i] * B[i] + D[i]
                        ^

factors are joined by '*' alone; for a quotient, pass the reciprocals of the divisor
    C[i] += A[i]/B[i]
                ^

factors are joined by '*' alone; for a power, write the factor several times
    C[i] += A[i] ** 2 * B[i]
                 ^

factors are joined by '*' alone; the indices say what is summed over
    C[i] += A[i] @ B[i]
                 ^

only a tensor's name can be indexed
    C[i] += f(x)[i]
            ^

all indices of a tensor stand in one pair of brackets, as in A[i,j]
    C[i] += A[i][j]
            ^

only a tensor's name can be indexed
    C[i] += A[B.T[i]]
              ^

only a tensor's name can be indexed
    C[i] = [i
           ^

indices stand in square brackets, as in f[x]
    C[i] += f(x)
            ^

max and min are the only functions; a product alone is summed over indices that the output lacks
    C[i] = sum(A[i,k])
           ^

a factor is an access such as A[i,j] or a real number
    C[i] = max(*A[i,k])
               ^

max has no sum to start from; write =
    C[i] += max(A[i,k])
         ^

min has no sum to start from; write =
    C[i]+=min(A[i,k] * 2)
        ^

max stands once, around all factors, such as C[i] = max(2 * A[i,k])
    C[i] = 2 * max(A[i,k])
               ^

min stands once, around all factors, such as C[i] = min(2 * A[i,k])
    C[i] = min(A[i,k]) * B[i]
           ^

max stands once, around all factors, such as C[i] = max(2 * A[i,k])
    C[i] = min(max(A[i,k]))
               ^

max stands around the factors, such as max(A[i,k] * B[k])
    C[i] = max()
           ^

min stands around the factors, such as min(A[i,k] * B[k])
    C[i] = min(x=A[i,k])
           ^

max is taken of one product, over the indices that the output lacks; torch.maximum compares two tensors
    C[i] = max(A[i,k], B[k])
                     ^

commas stand between indices only; factors are joined by '*'
    C[i] = max(A[i,k],)
                     ^

factors are joined by '*' alone; for a sum, pass the first result to a second call, whose += adds to it
    C[i] = max(A[i,k] + B[k])
                      ^

expected ')' to close max(
    C[i] = max(A[i,k] * B[k]
                            ^

expected ')' to close min(
    C[i] = min(
               ^

expected ']' to close A[
    C[i] = max(A[i,k)
                    ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] = max(A[i,k] *
                       ^

'B' can't follow ']'; factors are joined by '*'
    C[i] = max(A[i,k] B[k])
                      ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] = max((A[i,k]))
               ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] = (max(A[i,k]))
           ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] = max(A[i,k]))
                      ^

'max' needs indices, such as max[i]; a scalar tensor is max[()], and a number stands in the text itself
    C[i] = max
           ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] = A[max(i)]
             ^

a factor is an access such as A[i,j] or a real number
    C[i] += A[i] * 2j
                   ^

a factor is an access such as A[i,j] or a real number
    C[i] += [A[i]]
            ^

a factor is an access such as A[i,j] or a real number
    C[i] += 'A[i]'
            ^

'A' needs indices, such as A[i]; a scalar tensor is A[()], and a number stands in the text itself
    C[i] += B[i] * A
                   ^

'inf' needs indices, such as inf[i]; a scalar tensor is inf[()], and a number stands in the text itself
    C[i] += inf * A[i]
            ^

only a number has a sign; multiply by -1 instead
    C[i] += -A[i]
            ^

only a number has a sign; multiply by -1 instead
    C[i] += A[i] * +2
                   ^

commas stand between indices only; factors are joined by '*'
    C[i] += A[i], B[i]
                ^

this is einsum's notation; write C[i,k] += A[i,j] * B[j,k] and pass each tensor by its name
    ij,jk->ik
    ^

an index is not a slice; name the index and it runs over the whole dimension
    C[i] += A[i,:]
                ^

an index is not a slice; name the index and it runs over the whole dimension
    C[i] += A[0:2,i]
              ^

a constant index counts from the start, 0 or larger; the last one is the size minus 1
    C[i] += A[i,-1]
                ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] += A[1.5]
              ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] += A['i']
              ^

'...' is not in the language; name every dimension
    C[i] += A[...]
              ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] += A[f(i)]
              ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] += A[[i]]
              ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] += A[i,()]
                ^

an index is a name, an integer or an access such as AK[p,q]
    C[i] += A[[i]
              ^

expected ']' to close B[
    C[AM[p],n] += AV[p,q] * B[AK[p,q],n
                                       ^

expected ']' to close C[
    C[i += A[i]
       ^

expected ']' to close C[
    C[AM[p] += V[p]
           ^

expected ']' to close A[
    C[i] += A[i * B[i]
               ^

']' closes nothing
    C[i] += A[i]] * B[i]
                ^

empty brackets; a full reduction is written C[()]
    C[] += A[i]
      ^

a comma with no index after it
    C[i,] += A[i]
       ^

',' can't follow ','
    C[i] += A[i,,j]
                ^

',' can't follow '['
    C[i] += A[,i]
              ^

'j' can't follow 'i'
    C[i] += A[i j]
                ^

'B' can't follow ']'; factors are joined by '*'
    C[i] += A[i] B[i]
                 ^

'*' can't follow '*'
    C[i] += A[i] * * B[i]
                   ^

'+=' has nothing before it
    += A[i]
    ^

nothing follows '+='; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] +=
           ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += A[i] *
                  ^

'2A' is not a number
    C[i] += 2A[i]
            ^

'1.5.2' is not a number
    C[i] += 1.5.2 * A[i]
            ^

the product of the numbers is too large for a float
    C[i] += 1e400 * A[i]
            ^

the product of the numbers is too large for a float
    C[i] += 1e200 * A[i] * -1e200
                           ^

not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += 007 * A[i]
            ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] += (A[i] * B[i]) * D[i]
            ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] += D[i] * (A[i] * B[i])
                   ^

parentheses are not in the language (a full reduction is written C[()])
    C[(i,j)] += A[i,j]
      ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] += A[i])
                ^

'#' is not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += A[i] # all of it
                 ^

';' is not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += A[i];
                ^

':' is not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] := A[i]
         ^

'{' is not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += A{i}
             ^

'·' is not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    Ü[i] += Ä[i] · B[i]
                 ^

"'" is not in the language; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += A[i'
               ^

not an assignment; a statement reads C[i,...] += A[i,...] * B[...]
    A[i] * B[i]
    ^

not an assignment; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] == A[i]
    ^

not an assignment; a statement reads C[i,...] += A[i,...] * B[...]
    print('hello')
    ^

only '=' and '+=' assign; to subtract, write C[i] += -1 * A[i]
    C[i] -= A[i]
         ^

only '=' and '+=' assign
    C[i] **= A[i]
         ^

one output per statement
    C[i] = D[i] = A[i]
           ^

one output per statement
    C[i], D[i] = A[i]
          ^

one assignment per statement
    C[i] += A[i] += B[i]
                 ^

expected one statement; a call evaluates one, and the next call takes its result by name
    C[i] = A[i]; D[i] = B[i]
                 ^

the output needs its indices, such as C[i,j] (a full reduction is written C[()])
    C += A[i]
    ^

expected one statement; a statement reads C[i,...] += A[i,...] * B[...]
    # C[i] = A[i]
    ^

the output needs its indices, such as C[i,j] (a full reduction is written C[()])
    (C) = A[i]
     ^

commas stand between indices only; factors are joined by '*'
    C[i] = ()
           ^

only a number has a sign; multiply by -1 instead
    C[i] = --2 * A[i]
           ^

parentheses are not in the language (a full reduction is written C[()])
    max(A[i]) =
       ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] += max(A[i] *
                      ^

expected ']' to close B[
    C[i] = max(A[()] * B[i
                          ^

expected ']' to close C[
    C[i = A[i]
       ^

one assignment per statement
    C[i] = A[i] = B[i] *
                ^

nothing follows '+='; a statement reads C[i,...] += A[i,...] * B[...]
    C[()] +=
            ^

nothing follows '='; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] =
          ^

'2' can't follow ']'; factors are joined by '*'
    C[i] = A[i] 2
                ^

'A' can't follow '2'
    C[i] = 2 A[i]
             ^

'A' can't follow '1.5'
    C[i] = 1.5 A[i]
               ^

parentheses are not in the language (a full reduction is written C[()])
    C[i] = (A[i]
           ^

']' can't follow ','
    C[i,] += A[j
        ^

'=' can't follow '+='
    C[i] += = A[i]
            ^

'*' can't follow '='
    C[i] = * A[i] *
           ^

'*' can't follow '-'
    C[i] = -* A[i]
            ^

'0xfg' is not a number
    C[i] = 0xfg * A[i]
           ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] = 0x10 *
                 ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] = 0O17 *
                 ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] = 0b1 *
                ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] = 1e+3 *
                 ^

nothing follows '*'; a statement reads C[i,...] += A[i,...] * B[...]
    C[i] = 1E-3 *
                 ^

this is einsum's notation; write C[i,k] += A[i,j] * B[j,k] and pass each tensor by its name
    ij, jk -> ik
    ^

this is einsum's notation; write C[()] += A[i] * B[i] and pass each tensor by its name
    i,i->
    ^

this is einsum's notation; write C[()] += A[i,i] and pass each tensor by its name
    ii
    ^

this is einsum's notation; write C[i,k] += A[i,j] * B[j,k] and pass each tensor by its name
    ij,jk
    ^

this is einops' notation; write C[b,i,j] += A[b,i,k] * B[k,j] and pass each tensor by its name
    b i k, k j -> b i j
    ^

this is einsum's notation; name every dimension that '...' stands for, as in C[b,i] += A[b,i]
    ...i,ij->...j
    ^

this is einops' notation; a statement does not reshape, so reshape the tensor with torch first
    b (h w) -> b h w
    ^

this is einops' notation; write C[()] += A[b,i] and pass each tensor by its name
    b i ->
    ^

commas stand between indices only; factors are joined by '*'
    ij,1->j
      ^

this is einsum's notation; write C[a] += A[a] * B[b] * D[c] * E[d] * F[e] * G[f] * H[g] and pass each tensor by its name
    a,b,c,d,e,f,g->a
    ^

commas stand between indices only; factors are joined by '*'
    a,b,c,d,e,f,g,h->a
     ^

this is einsum's notation; write C[f] += A[f,o,o] and pass each tensor by its name
    foo
    ^

this is einsum's notation; write C[b] += A[a] * B[a] * D[b] and pass each tensor by its name
    a,a,b
    ^

max is taken of one product, over the indices that the output lacks; torch.clamp(..., min=0) bounds the result
    C[i] = max(A[i], 0)
                   ^

min is taken of one product, over the indices that the output lacks; torch.clamp(..., max=-1.5) bounds the result
    C[i] = min(A[i], -1.5)
                   ^

max is taken of one product, over the indices that the output lacks; torch.maximum compares two tensors
    C[i] = max(A[i], B[i], D[i])
                   ^

min is taken of one product, over the indices that the output lacks; torch.minimum compares two tensors
    C[i] = min(A[i], B[i])
                   ^

factors are joined by '*' alone
    C[i] += A[i] // B[i]
                 ^

indices stand in square brackets, as in A[i,k]
    C[i] += A(i,k)
            ^

indices stand in square brackets, as in C[i,j]
    C(i,j) += A(i,k)
     ^

indices stand in square brackets, as in C[i]
    C(i += A[i]
     ^

all indices of a tensor stand in one pair of brackets, as in A[i,j,k,0]
    C[i] += A[i,j][k][0]
            ^

max and min are the only functions; for a mean, sum with one over the number of terms as a factor
    C[i] += mean(A[i,j])
            ^

max and min are the only functions; call torch.exp on a tensor before or on the result after
    C[i] += torch.exp(A[i])
            ^

max and min are the only functions; call f on a tensor before or on the result after
    C[i] += f()
            ^

the output stands on the left, as in C[i,j] += A[i,k] * B[k,j]
    A[i,k] * B[k,j] -> C[i,j]
                     ^

not an assignment; a statement reads C[i,...] += A[i,...] * B[...]
    f(x, y)
    ^

this is einsum's notation; write C[b,e,h,l,p,t] += A[a,l,p,h,a] * B[b,e,t,a] and pass each tensor by its name
    alpha, beta
    ^

only '=' and '+=' assign
    C[i] /= A[i]
         ^

only '=' and '+=' assign; to subtract, write C[AM[p],i] += -1 * A[p,i]
    C[AM[p],i] -= A[p,i]
               ^

only '=' and '+=' assign; to subtract, write C[i] += -1 * A[i]
    C[i]-=A[i]
        ^

the output stands on the left, as in B[i] -> C[i] += A[i]
    A[i] -> B[i] -> C[i]
          ^

only a tensor's name can be indexed
    C[i] += (A * B)[i][j]
            ^

this is einsum's notation; write C[x] += A[l,a,m,b,d,a] * B[x] and pass each tensor by its name
    lambda,x->x
    ^

'2' can't follow 'i'
    i 2 -> i
      ^
"""
)


def message(expr: str) -> str:
    with pytest.raises(ParseError) as caught:
        parse(expr)
    return str(caught.value)


@pytest.mark.parametrize(("expr", "expected"), MESSAGES, ids=[expr for expr, _ in MESSAGES])
def test_message(expr: str, expected: str) -> None:
    assert message(expr) == expected


@pytest.mark.parametrize("name", keyword.kwlist)
def test_a_python_keyword_is_no_name(name: str) -> None:
    problem = f"'{name}' is a Python keyword, not a name; call it something else\n"
    assert message(f"{name}[i] += A[i]") == f"{problem}    {name}[i] += A[i]\n    ^"
    assert message(f"C[i] += {name}[i]") == f"{problem}    C[i] += {name}[i]\n            ^"
    assert message(f"C[i] += A[{name}]") == f"{problem}    C[i] += A[{name}]\n              ^"


@pytest.mark.parametrize("name", ["match", "case", "type", "_", "print", "__import__", "eval", "µ"])
def test_every_other_identifier_is_a_name(name: str) -> None:
    assert parse(f"{name}[{name}] += A[{name}]").output.indices == parse(f"C[i] = B[{name}]").accesses[0].indices


LANGUAGE = "a statement reads C[i,...] += A[i,...] * B[...]"


@pytest.mark.parametrize("text", ["", " ", "\n", "\t \n"])
def test_an_empty_expression(text: str) -> None:
    assert message(text) == f"the expression is empty; {LANGUAGE}"


@pytest.mark.parametrize("text", ["C[i] +=\nA[i]", "C[i] += A[i]\n\nD[i] = A[i]", "C[i] += A[i]\r* B[i]"])
def test_several_lines(text: str) -> None:
    assert message(text) == "the expression spans several lines; write one statement on one line"


@pytest.mark.parametrize(
    ("text", "kind"), [(3, "int"), (None, "NoneType"), (b"C[i] = A[i]", "bytes"), (["C[i] = A[i]"], "list")]
)
def test_an_expression_is_a_string(text: object, kind: str) -> None:
    assert message(text) == f"the expression is of type {kind}, not a string; {LANGUAGE}"  # type: ignore[arg-type]


def test_a_layer_is_told_to_pass_its_statement() -> None:
    class Layer:
        EXPR = "C[i] = A[i]"

    expected = "the expression is of type Layer, not a string; pass its EXPR, which is C[i] = A[i]"
    assert message(Layer()) == expected  # type: ignore[arg-type]


def test_no_statement_is_that_long() -> None:
    text = "C[i] += " + "*".join(["A[i]"] * LONGEST)
    assert message(text) == f"the expression has {len(text)} characters; at most {LONGEST} are read"
    factors = parse("C[i] += " + "*".join(["A[i]"] * 1000)).factors
    assert factors == (Access("A", (Var("i"),)),) * 1000
    longest = f"C[i] = {'A' * (LONGEST - len('C[i] = [i]'))}[i]"
    assert str(parse(longest)) == longest
    assert message(f"C{longest}") == f"the expression has {LONGEST + 1} characters; at most {LONGEST} are read"


def test_brackets_nest_deep_but_not_without_end() -> None:
    deep = f"C[i] += {'A[' * DEEPEST}i{']' * DEEPEST}"
    assert str(parse(deep)) == deep
    deeper = f"C[i] += {'A[' * DEEPEST}A[i]{']' * DEEPEST}"
    caret = " " * (len("C[i] += ") + 2 * DEEPEST + 1) + "^"
    assert message(deeper) == f"brackets are nested more than {DEEPEST} deep\n    {deeper}\n    {caret}"


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_pythons_parser_may_give_up(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(text: str) -> None:
        raise error

    monkeypatch.setattr(ast, "parse", give_up)
    assert message("C[i] += A[i] * A[i] * A[i]") == "the expression has too many operators in a row to be read"


def test_a_number_with_very_many_digits() -> None:
    text = f"C[i] += A[i] * {'9' * 5000}"
    assert message(text).splitlines()[0] in (
        "the number is too large for a float",  # Python refuses to read it
        "the product of the numbers is too large for a float",
    )
    assert message(text).splitlines()[2] == " " * 19 + "^"
    text = f"C[i] += 1.5 * {'9' * 400}"
    assert message(text) == f"the product of the numbers is too large for a float\n    {text}\n{' ' * 18}^"


def test_surrounding_space_does_not_move_the_caret() -> None:
    assert message(" \t C[i] += A[i+1] \n") == message("C[i] += A[i+1]")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("C[i]=max(A[i,k]*B[k])", "C[i] = max(A[i,k] * B[k])"),
        ("C [()] = min ( -2 * A[i] )", "C[()] = min(-2 * A[i])"),
        ("C[E[p]] = max(1)", "C[E[p]] = max(1)"),
        ("max[min] = max(max[min,max])", "max[min] = max(max[min,max])"),
        ("C[i] = max[i] * min[max[i]]", "C[i] = max[i] * min[max[i]]"),
        ("C[i] = max(A[()])", "C[i] = max(A[()])"),
    ],
)
def test_max_and_min_are_reductions_and_names(text: str, canonical: str) -> None:
    statement = parse(text)
    assert str(statement) == canonical
    assert parse(canonical) == statement
    assert statement.is_sum == (statement.reduction == "sum") == ("max(" not in canonical and "min(" not in canonical)


def test_a_message_is_a_value_error() -> None:
    assert issubclass(ParseError, InsumError)
    assert issubclass(InsumError, ValueError)


def test_a_statement_as_data() -> None:
    statement = parse("C[AM[p],n] += AV[p,q] * B[AK[p,q],0] * -2.5")
    p, q, n = map(Var, "pqn")
    assert statement == Statement(
        Access("C", (Access("AM", (p,)), n)),
        (Access("AV", (p, q)), Access("B", (Access("AK", (p, q)), Const(0))), Number(-2.5)),
        "+=",
    )
    assert statement.text == "C[AM[p],n] += AV[p,q] * B[AK[p,q],0] * -2.5"
    assert parse("C[i]=A[i]").op == "="


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("C[i]+=A[i]*B[i]", "C[i] += A[i] * B[i]"),
        ("  C [ i , j ]=A[ j,i ] ", "C[i,j] = A[j,i]"),
        ("C[()] += A[( )]", "C[()] += A[()]"),
        ("C[ () ] += A[ ( ) ]", "C[()] += A[()]"),
        ("X[X] = XX[X]", "X[X] = XX[X]"),
        ("C[i] += 1e-1 * A[0x10] * -3 * .5", "C[i] += 0.1 * A[16] * -3 * 0.5"),
        ("Zeile[zeile] = Werte[Spalte[zeile], 7_0]", "Zeile[zeile] = Werte[Spalte[zeile],70]"),
        ("\ufb01[\uff49] = A[i]", "fi[i] = A[i]"),  # Python's own normal form of names
    ],
)
def test_spelling(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


@pytest.mark.parametrize(
    ("numbers", "values"),
    [
        ("2 * 3", (2, 3)),
        ("9007199254740993", (9007199254740992.0,)),
        ("4294967296 * 4294967296", (4294967296.0, 4294967296.0)),
        ("9007199254740992 * A[i]", (9007199254740992.0,)),
        ("9007199254740991 * A[i]", (9007199254740991,)),
        ("0 * 1e308", (0, 1e308)),
        ("1.7976931348623157e308", (1.7976931348623157e308,)),
    ],
)
def test_integers_become_floats_where_torch_could_not_take_them(numbers: str, values: tuple[float, ...]) -> None:
    found = tuple(factor.value for factor in parse(f"C[i] = {numbers}").factors if isinstance(factor, Number))
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


def test_a_text_is_parsed_once() -> None:
    assert parse("C[i] = A[i]") is parse("C[i] = A[i]")


@settings(max_examples=examples(200, 200))
@given(statements(reductions=EVERY))
def test_a_statements_text_gives_the_statement_back(case: Case) -> None:
    statement = parse(case.expr)
    assert parse(str(statement)) == statement


@settings(max_examples=examples(200, 200))
@given(statements(reductions=EVERY))
def test_every_part_knows_where_it_stands(case: Case) -> None:
    statement = parse(case.expr)
    for root in (statement.output, *statement.accesses):
        for access in walk(root):
            assert case.expr.strip()[access.at :].startswith(access.name)
            for index in access.indices:
                assert case.expr.strip()[index.at :].startswith(str(index).split("[")[0])


def check_refusal(text: str) -> None:
    """A statement, or one ParseError whose caret stands in the text or right behind it."""
    try:
        statement = parse(text)
    except ParseError as error:
        lines = str(error).split("\n")
        if len(lines) == 3:
            assert lines[1] == f"    {text.strip()}"
            assert lines[2].lstrip(" ") == "^"
            assert len(lines[2]) <= len(lines[1]) + 1
    else:
        assert parse(str(statement)) == statement


PIECES = [
    *"ABCijk[](),*+-=.:0129#;'\"\\@ {}",
    "+=",
    "[i]",
    "[()]",
    "A[i]",
    "max",
    "min(",
    "1e",
    "0x",
    "if",
    "é",
    "日",
    "x²",
    "\x00",
]


@settings(max_examples=examples(500, 500))
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.sampled_from(["", "C[i] += ", "C[i] = A[", "C[i] = max("]),
)
def test_no_text_gets_anything_but_a_statement_or_a_message(tail: str, head: str) -> None:
    check_refusal(head + tail)


@settings(max_examples=examples(300, 300))
@given(statements(reductions=EVERY), st.data())
def test_a_statement_with_a_slip_of_the_pen(case: Case, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(case.expr) - 1))
    slip = data.draw(st.sampled_from(["", *PIECES]))
    check_refusal(case.expr[:at] + slip + case.expr[at + 1 :])
