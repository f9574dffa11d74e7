-- Web sales in the morning against those in the evening: a quotient of two one-row tables.
select cast(amc as decimal(15,4)) / cast(pmc as decimal(15,4)) as am_pm_ratio
from (
  select count(*) as amc
  from web_sales
  join household_demographics on hd_demo_sk = ws_ship_hdemo_sk
  join time_dim on t_time_sk = ws_sold_time_sk
  join web_page on wp_web_page_sk = ws_web_page_sk
  where t_hour between 8 and 8 + 1 and hd_dep_count = 6
    and wp_char_count between 5000 and 5200
) as morning
cross join (
  select count(*) as pmc
  from web_sales
  join household_demographics on hd_demo_sk = ws_ship_hdemo_sk
  join time_dim on t_time_sk = ws_sold_time_sk
  join web_page on wp_web_page_sk = ws_web_page_sk
  where t_hour between 19 and 19 + 1 and hd_dep_count = 6
    and wp_char_count between 5000 and 5200
) as evening
order by am_pm_ratio
limit 100
