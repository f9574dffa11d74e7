"""Every function that Spark documents, and expressions of every type: written as text from
Catalyst's tree, and analysed to the same tree again.

The laboratory (`expression_lab.py`) takes the examples of Spark's documentation, as they are and
with columns for their constants, and the expressions below, with ANSI mode and without. Of the
documentation's functions, and without ANSI mode of the expressions, this is a sample; `make proof`
takes them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import expression_lab  # type: ignore[import-not-found]
import pytest

import actors
from actors.engine.spark.class_archive import find_archive
from actors.engine.spark.java import JavaHome
from actors.testing.patience import PROGRAM_S

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.sampled]

ONE_IN = 6
"""Of so many functions one is in the sample."""
WIDTH = 1_000
"""Of expressions of many terms; a sample's are narrower."""

NOT_RENDERED: dict[str, str] = {}
"""Functions whose documented calls are not written again, with the reason."""
CHANCE = "a function of chance or of the machine: refused before it is rendered"
CLOCK = "a function of the clock: refused before it is rendered"
CAST = "a cast, among EXPRESSIONS"
PLAN = "no expression: the analysis makes plan nodes of it"
LISTED = "its example is over a subquery: among EXPRESSIONS or AGGREGATES"
ABSENT = "its example needs a module, a file, a view, a setting or a state that is not there"
_NOT_SHOWN_BY_REASON = {
    CHANCE: """aes_encrypt input_file_block_length input_file_block_start input_file_name
        java_method monotonically_increasing_id rand randn random randstr reflect shuffle
        spark_partition_id try_reflect uniform uuid""",
    CLOCK: """curdate current_date current_time current_timestamp localtime localtimestamp now""",
    CAST: """bigint binary boolean date decimal double float int smallint string time timestamp
        tinyint""",
    PLAN: "grouping grouping_id session_window window window_time",
    LISTED: """counter_diff hll_union_agg kll_merge_agg_bigint
        kll_merge_agg_double kll_merge_agg_float theta_intersection_agg theta_union_agg
        tuple_intersection_agg_double tuple_intersection_agg_integer tuple_union_agg_double
        tuple_union_agg_integer""",
    ABSENT: """approx_top_k_combine from_avro from_protobuf measure schema_of_avro to_avro
        to_protobuf unix_nanos""",
}
NOT_SHOWN = {
    name: reason for reason, names in _NOT_SHOWN_BY_REASON.items() for name in names.split()
}
"""Functions of which no documented call is compared, with the reason."""
RENDERED_SHARE_MIN = 0.95
FUNCTIONS_MIN = 400
EXPRESSIONS = r"""
i + j
i - j * 2
(i + j) * (i - j) / 2
i + (j - i)
i - (j - i)
i - j - l
i / j
i div j
i % j
- i
- (-5)
i + -5
~ i
i & j | i ^ j
h + y
y + 1Y
h * 3S
f * 1.5F
d * -0.0D
d + double('NaN')
d + double('-Infinity')
d / 1e-300
c * 1.50
c + 0.05
c * 100BD
e * e
e / c
c % 7
c + CAST('1.5' AS decimal(20,5))
-9223372036854775808L + l
CAST(-128 AS tinyint) + y
try_add(i, j)
try_subtract(l, 1)
try_multiply(c, e)
try_divide(i, j)
try_mod(i, 3)
try_add(t, 1)
try_add(at, INTERVAL '1' DAY)
try_cast(s AS int)
CAST(s AS decimal(5,2))
CAST(i AS string)
CAST(at AS date)
CAST(at AS timestamp_ntz)
CAST(n AS timestamp)
CAST(s AS timestamp)
CAST(at AS string)
CAST(x AS string)
CAST(a AS array<bigint>)
CAST(r AS struct<a:bigint,b:string>)
CAST(m AS map<string,bigint>)
CAST(NULL AS struct<a:int,`b c`:string>)
CAST(i AS boolean)
CAST(b AS int)
CAST(dt AS string)
CAST(i AS interval day)
CAST(ym AS interval year)
i = j
i <=> NULL
i <> j
NOT (i < j)
i BETWEEN 1 AND 3
i NOT BETWEEN j AND 3
i IN (1, 2, NULL)
i NOT IN (1, 2)
s IN ('a', u)
s IS NULL AND u IS NOT NULL
b AND p OR NOT b
b AND (p AND b)
b OR (p OR (b AND p))
b IS TRUE
b IS NOT UNKNOWN
s LIKE 'a%b\\_'
s LIKE u ESCAPE '!'
s LIKE 'a!%' ESCAPE '!'
s ILIKE 'x%'
s ILIKE 'x!%' ESCAPE '!'
s LIKE ALL ('a%', 'b%')
s LIKE ANY ('a%', NULL)
s NOT LIKE ALL ('a%', 'b\'%')
s NOT LIKE ANY ('a%', 'b%')
s LIKE ANY ('a%', u)
s RLIKE '^\\d+$'
s || u || 'x'
s || (u || 'x')
x || x
a || a
concat(s, u, s)
'it\'s "q" \\ \n \t \r \0 \u00e9 \u20ac'
'😀' || s
''
' a  '
'%\\%'
'\u0024{spark.master} x${spark.master}'
r'raw\n' || s
X'00FF' || x
DATE'2020-02-29'
DATE'0001-01-01'
DATE'-0044-03-15'
DATE'+12020-01-01'
TIMESTAMP'2020-10-25 02:30:00'
TIMESTAMP'2020-10-25 02:30:00+01:00'
TIMESTAMP'2020-10-25 02:30:00.123456+02:00'
TIMESTAMP'1800-01-01 00:00:00'
TIMESTAMP'+12020-01-01 00:00:00'
TIMESTAMP_NTZ'2020-01-01 00:00:00.000001'
TIME'12:34:56.123456'
TIME'12:34:56'
INTERVAL '1-2' YEAR TO MONTH
INTERVAL '-3' MONTH
INTERVAL 3 YEARS
INTERVAL '1 02:03:04.5' DAY TO SECOND
INTERVAL '-1 02:03' DAY TO MINUTE
INTERVAL '25' HOUR
INTERVAL '1:30' MINUTE TO SECOND
INTERVAL '90.000001' SECOND
make_interval(i, j)
t + INTERVAL '1' DAY
t - INTERVAL '1' DAY
t + INTERVAL '1' MONTH
t - INTERVAL 1 YEAR
t + INTERVAL '2' HOUR
t + i
t - 3
t - t
at + INTERVAL '1' DAY
at - INTERVAL '1' DAY
at - INTERVAL '1-2' YEAR TO MONTH
at + dt
at - dt
at + ym
n + dt
n - ym
at + ci
at - ci
t + ci
at - at
n - at
at - t
t - ym
dt * 2
2 * dt
dt / 3
ym * 1.5
ym / i
- dt
dt + dt
ym - ym
ci + ci
timestampadd(HOUR, i, at)
timestampdiff(MONTH, n, at)
dateadd(DAY, i, t)
datediff(t, t)
datediff(HOUR, at, n)
extract(YEAR FROM t)
extract(SECOND FROM at)
date_part('day', dt)
date_trunc('month', at)
trunc(t, 'MM')
date_format(at, 'yyyy-MM-dd')
to_date(s)
to_date(s, 'yyyy')
to_timestamp(s)
to_timestamp(s, 'yyyy-MM-dd')
to_timestamp_ntz(s)
try_to_timestamp(s)
unix_timestamp(at)
unix_timestamp(s, 'yyyy')
from_unixtime(l)
make_date(i, j, 1)
make_timestamp(i, j, 1, 2, 3, 4.5)
make_timestamp(i, j, 1, 2, 3, 4.5, 'UTC')
try_make_timestamp(i, j, 1, 2, 3, 4.5)
hour(at)
last_day(t)
months_between(at, at)
months_between(at, at, false)
from_utc_timestamp(at, 'CET')
convert_timezone('UTC', n)
upper(s)
trim(s)
ltrim(s)
trim(BOTH 'x' FROM s)
trim(LEADING u FROM s)
rtrim('x', s)
btrim(s, 'x')
substring(s, 1, 2)
substring(s FROM 2)
left(s, 2)
right(s, i)
lpad(s, 5)
lpad(s, 5, 'x')
rpad(x, 5)
overlay(s PLACING 'x' FROM 2 FOR 1)
position('a' IN s)
instr(s, 'a')
replace(s, 'a')
split(s, ',', 2)
split_part(s, ',', 1)
regexp_replace(s, '(\\d)', '$1')
regexp_extract(s, '(a)(b)', 2)
regexp_count(s, 'a')
nvl(i, 0)
nvl(nvl(nvl(nvl(nvl(nvl(nvl(nvl(nvl(nvl(nvl(nvl(i, 0), 1), 2), 3), 4), 5), 6), 7), 8), 9), 10), 11)
nvl2(s, 1, 2)
nullif(i, 0)
coalesce(i, l, 3)
ifnull(s, 'x')
zeroifnull(i)
nullifzero(i)
equal_null(s, u)
if(b, 1, 2.5)
CASE WHEN b THEN 1 WHEN p THEN 2 END
CASE i WHEN 1 THEN 'a' ELSE s END
decode(i, 1, 'a', 2, 'b', 'c')
greatest(i, l, 2)
round(d, 2)
round(c)
bround(d)
ceil(d)
ceil(c, 1)
floor(d, -1)
abs(i)
sign(d)
power(d, 2)
log(d)
log(2, d)
pmod(i, 3)
r.k
r.v || s
ra.k
ra[0].v
a[0]
a[i]
m['k']
m[s]
aa[0][1]
element_at(a, 1)
element_at(m, 'x')
try_element_at(a, 9)
get(a, 0)
named_struct('a', i, 'b c', s)
struct(i, s)
struct(i AS p, s).p
array(i, j)
array()
map('a', 1)
map()
map_from_arrays(sa, a)
size(a)
cardinality(m)
sort_array(a, false)
array_sort(a)
array_sort(a, (p, q) -> q - p)
transform(a, z -> z + i)
transform(a, (z, k) -> z * k)
transform(a, i -> i + j)
transform(aa, z -> transform(z, y -> y + size(z)))
transform(a, z -> nvl(z, 0))
filter(a, z -> z > 1)
exists(a, z -> z IS NULL)
forall(a, z -> z BETWEEN 1 AND i)
aggregate(a, 0, (acc, z) -> acc + z)
aggregate(a, 0, (acc, z) -> acc + z, acc -> acc * 10)
zip_with(a, a, (p, q) -> p + q)
map_filter(m, (k, z) -> z > 1)
transform_keys(m, (k, z) -> upper(k))
arrays_zip(a, sa)
sequence(i, j)
sequence(t, t, INTERVAL 1 MONTH)
sequence(1, 9, 2)
slice(a, 1, 2)
to_json(r)
to_json(struct(i, s), map('k', 'it\'s'))
from_json(s, 'a INT, b STRING')
from_json(s, 'a INT, b ARRAY<STRUCT<c: TIMESTAMP>>', map('mode', 'FAILFAST'))
from_csv(s, 'a INT')
schema_of_json('{"a":1}')
get_json_object(s, '$.a')
parse_json(s)
try_parse_json(s)
variant_get(v, '$.a', 'int')
try_variant_get(v, '$.a', 'array<int>')
v:a.b::int
to_variant_object(r)
hash(i, s)
xxhash64(i)
md5(x)
sha2(s, 256)
base64(x)
unbase64(s)
unhex(s)
hex(i)
encode(s, 'UTF-8')
decode(x, 'UTF-8')
to_binary(s, 'hex')
to_number(s, '999')
to_char(c, '999.99')
try_to_number(s, '999')
format_number(d, 2)
format_string('%d %s', i, s)
conv(s, 10, 16)
bin(l)
assert_true(b)
raise_error('x')
typeof(i)
s COLLATE UTF8_LCASE = u
collate(s, 'UNICODE_CI')
upper(s COLLATE UNICODE)
url_encode(s)
parse_url(s, 'HOST')
xpath_int(s, 'a')
width_bucket(d, 0, 10, 5)
mask(s)
mask(s, 'X', 'x', NULL)
concat_ws(',', s, sa)
concat_ws(',')
elt(2, s, u)
find_in_set(s, 'a,b')
levenshtein(s, u)
levenshtein(s, u, 2)
soundex(s)
translate(s, 'a', 'b')
char(i)
ascii(s)
bit_count(i)
shiftleft(i, 2)
i << 2
l >>> 1
b = p < b
NOT NOT b
(i, s) IN ((1, 'a'), (2, 'b'))
(i, s) = (1, 'a')
count(*) OVER ()
sum(i) OVER (PARTITION BY s ORDER BY t)
sum(i) OVER (PARTITION BY s ORDER BY t ROWS BETWEEN 2 PRECEDING AND 1 FOLLOWING)
sum(i) OVER (ORDER BY l RANGE BETWEEN 10 PRECEDING AND CURRENT ROW)
sum(i) OVER (ORDER BY t RANGE BETWEEN INTERVAL 1 DAY PRECEDING AND INTERVAL 2 DAY FOLLOWING)
sum(i) OVER (ORDER BY l DESC NULLS FIRST ROWS BETWEEN UNBOUNDED PRECEDING AND 3 FOLLOWING)
lag(i) OVER (ORDER BY l)
lag(i, 2, 0) OVER (PARTITION BY s ORDER BY l)
lead(i, 2) IGNORE NULLS OVER (ORDER BY l)
row_number() OVER (PARTITION BY s ORDER BY l DESC)
rank() OVER (ORDER BY l, s)
ntile(4) OVER (ORDER BY l)
nth_value(i, 2) IGNORE NULLS OVER (ORDER BY l)
first_value(i) OVER (ORDER BY l)
avg(c) FILTER (WHERE b) OVER (PARTITION BY s)
cume_dist() OVER (ORDER BY l)
counter_diff(l) OVER (PARTITION BY s ORDER BY n)
int(s)
bigint(i)
smallint(i)
tinyint(i)
float(d)
double(s)
decimal(i)
string(at)
binary(s)
boolean(s)
date(s)
timestamp(s)
current_user() = s
a = array(1L)
coalesce(a, array(1.5))
array(i, 1.5, l)
map('a', i, 'b', 1.5)
b = TRUE
f = 'NaN'
x = X'00'
s > DATE'2020-01-01'
(i + j) IS NULL
t - dt
t + dt
CAST(t AS timestamp) + dt
CAST(at + dt AS timestamp)
b AND p AND b AND p AND NOT b
(b OR p) AND (p OR b) AND (b OR NOT p)
"""


def deep(width: int) -> list[str]:
    """Expressions of many nodes; two of them are as wide as told, at a cost of its square."""
    return [
        "upper(" * 100 + "s" + ")" * 100,
        "i" + " + 1" * 400,
        "i" + " + 1 - j" * 200,
        " OR ".join(f"i = {number}" for number in range(width)),
        " AND ".join(f"(i <> {number} OR b)" for number in range(width // 2)),
        "s" + " || 'x'" * 400,
    ]


SUBSTITUTED = """
nvl(q, 0)
nvl(nvl(q, k), 2)
q BETWEEN 1 AND k
q BETWEEN k AND k + 1
NOT (q NOT BETWEEN k AND l)
nullif(q, k)
nvl2(w, q, k)
ifnull(w, 'x')
equal_null(q, k)
zeroifnull(q)
left(w, 2)
btrim(w)
w ILIKE 'a%'
to_date(w)
to_timestamp(w, 'yyyy')
date_part('year', z)
z - INTERVAL '1' DAY
z - INTERVAL '1' MONTH
try_add(q, k)
if(q BETWEEN 1 AND 2, nvl(q, k), 3)
transform(a, e -> nvl(e, q))
transform(a, e -> e BETWEEN q AND k)
"""
"""Over columns that rules replace by what makes them: the parameters of replaceable functions
are stale then."""
RAW = r"""
s LIKE 'a\_b'
s RLIKE '^\d\\$'
s = 'it''s'
s = "it's"
s = 'a\tb'
regexp_replace(s, '\s+', ' ')
s = 'plain'
"""
"""Strings of a session whose backslashes stand for themselves."""
BELOW = "i + j AS q, i * 2 AS k, l, upper(s) AS w, at + dt AS z, a"
AGGREGATES = r"""
count(*)
count(1)
count(i, s)
count(DISTINCT i, s)
count(DISTINCT i) FILTER (WHERE b)
sum(i)
sum(DISTINCT c)
sum(i) FILTER (WHERE i > 1 AND b)
try_sum(l)
avg(c)
try_avg(i)
min(s)
max(at)
max_by(s, i)
max_by(s, i, 3)
min_by(s, i, 3)
first(i)
first(i, true)
last(i) IGNORE NULLS
any_value(i)
any_value(i, true)
bool_and(b)
every(b)
some(b)
bit_xor(i)
stddev(d)
var_pop(d)
corr(d, f)
covar_samp(d, f)
skewness(d)
kurtosis(d)
regr_slope(d, f)
regr_r2(d, f)
percentile(d, array(0.1, 0.9))
percentile_approx(d, array(0.1, 0.9), 100)
approx_count_distinct(i)
approx_count_distinct(i, 0.1)
percentile(d, 0.5)
percentile(d, 0.5, 2)
percentile_cont(0.25) WITHIN GROUP (ORDER BY d)
percentile_cont(0.25) WITHIN GROUP (ORDER BY d DESC)
percentile_disc(0.25) WITHIN GROUP (ORDER BY d DESC)
percentile_approx(d, 0.5, 100)
median(d)
mode(s)
mode(s, true)
mode() WITHIN GROUP (ORDER BY i)
mode() WITHIN GROUP (ORDER BY i DESC)
listagg(s)
listagg(s, ',') WITHIN GROUP (ORDER BY i DESC, s)
listagg(DISTINCT s, ',') WITHIN GROUP (ORDER BY s)
string_agg(x, X'00')
collect_list(i)
collect_set(s)
array_agg(i) FILTER (WHERE i > 0)
array_sort(collect_set(s))
count_if(b)
count_min_sketch(i, 0.5d, 0.5d, 1)
histogram_numeric(d, 5)
hll_union_agg(x)
hll_union_agg(x, true)
theta_union_agg(x)
theta_intersection_agg(x)
tuple_intersection_agg_double(x)
tuple_intersection_agg_integer(x)
kll_merge_agg_bigint(x)
kll_merge_agg_double(x)
kll_merge_agg_float(x)
tuple_union_agg_double(x)
tuple_union_agg_integer(x)
bitmap_or_agg(x)
approx_top_k(s, 3)
schema_of_variant_agg(v)
nvl(sum(i), 0)
sum(i) / count(*)
coalesce(max(s), 'none') || min(u)
sum(CASE WHEN b THEN c ELSE 0 END)
sum(i + j) * 2 - min(j)
"""


@pytest.fixture(scope="module")
def one_in(whole: bool) -> int:
    """Of so many functions one is looked at."""
    return 1 if whole else ONE_IN


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, java: JavaHome, one_in: int
) -> dict[str, Any]:
    """What one run of the laboratory says."""
    listed = EXPRESSIONS.strip().splitlines()
    some = [text for text in listed if expression_lab.in_sample(text, one_in)]
    wanted = {
        "listed": {"True": listed + deep(WIDTH // one_in), "False": some},
        "aggregates": AGGREGATES.strip().splitlines(),
        "substituted": SUBSTITUTED.strip().splitlines(),
        "below": BELOW,
        "raw": RAW.strip().splitlines(),
        "one_in": one_in,
        "archive": str(find_archive(java) or ""),
    }
    file = tmp_path_factory.mktemp("expressions") / "wanted.json"
    file.write_text(json.dumps(wanted))
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.home),
        "PYTHONPATH": str(Path(actors.__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, expression_lab.__file__, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("ansi", ["True", "False"])
def test_expressions_over_columns_of_every_type(
    outcomes: dict[str, Any], ansi: str, one_in: int
) -> None:
    told = outcomes["listed"][ansi]
    assert len(told) > (300 if ansi == "True" else 300 // one_in)
    assert {text: outcome for text, outcome in told.items() if outcome} == {}


def test_stale_parameters_are_not_written(outcomes: dict[str, Any]) -> None:
    told = outcomes["substituted"]
    assert {text: outcome for text, outcome in told.items() if outcome} == {}


def test_strings_whose_backslashes_stand_for_themselves(outcomes: dict[str, Any]) -> None:
    assert {text: outcome for text, outcome in outcomes["raw"].items() if outcome} == {}


def test_no_documented_call_becomes_another(outcomes: dict[str, Any]) -> None:
    different = {
        text: outcome
        for told in outcomes["documented"].values()
        for text, outcome in told.items()
        if outcome.startswith("!")
    }
    assert different == {}


def test_which_functions_are_not_rendered(outcomes: dict[str, Any], one_in: int) -> None:
    refused = {
        name: outcome
        for name, told in outcomes["documented"].items()
        for outcome in told.values()
        if outcome.startswith("-")
    }
    known = {name for name in NOT_RENDERED if expression_lab.in_sample(name, one_in)}
    assert refused.keys() == known, refused


def test_nearly_all_functions_are_rendered(outcomes: dict[str, Any], one_in: int) -> None:
    documented = outcomes["documented"]
    hidden = {n: why for n, why in NOT_SHOWN.items() if expression_lab.in_sample(n, one_in)}
    shown = {name for name, told in documented.items() if "" in told.values()}
    assert documented.keys() - shown - NOT_RENDERED.keys() == hidden.keys()
    refused = {name for name, reason in hidden.items() if reason in (CHANCE, CLOCK)}
    listed = {name for name, reason in hidden.items() if reason in (CAST, LISTED)}
    assert len(shown | listed) / len(documented.keys() - refused) > RENDERED_SHARE_MIN


def test_every_function_is_known(outcomes: dict[str, Any]) -> None:
    names = outcomes["names"]
    assert len(names) > FUNCTIONS_MIN
    assert NOT_SHOWN.keys() | NOT_RENDERED.keys() <= set(names)
